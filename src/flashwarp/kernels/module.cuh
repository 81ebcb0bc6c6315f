// Every built-in kernel in one translation unit. NVRTC compiles it for GPUs; the wheel has it
// compiled for the CPU device.
#pragma once

#include "maintenance.cuh"
#include "rows.cuh"
