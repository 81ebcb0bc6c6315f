// Every built-in kernel in one translation unit: what NVRTC compiles and the CPU device links.
#pragma once

#include "bfs.cuh"
#include "drives.cuh"
#include "gather.cuh"
#include "maintenance.cuh"
#include "query.cuh"
#include "queue.cuh"
#include "reduce.cuh"
