// The regions of a direction, as the engine's other files name them.
#pragma once

#include "flashwarp/batch/host_regions.cuh"

namespace fw::native::pipeline {

using Regions = batch::host_regions;

}  // namespace fw::native::pipeline
