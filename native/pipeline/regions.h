// The regions of a direction, as the engine's other files name them.
#pragma once

#include "flashwarp/batch/regions.cuh"

namespace fw::native::pipeline {

using Regions = batch::regions;

}  // namespace fw::native::pipeline
