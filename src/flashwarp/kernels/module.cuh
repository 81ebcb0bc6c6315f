// Every built-in kernel in one translation unit: what NVRTC compiles and the CPU device links.
#pragma once

#include "gather.cuh"
#include "maintenance.cuh"
#include "queue.cuh"
#include "reduce.cuh"
