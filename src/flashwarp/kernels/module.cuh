// Every built-in kernel in one translation unit, which is a program like any other: what NVRTC
// compiles, and what the wheel has compiled for the CPU device.
#pragma once

#include "maintenance.cuh"
#include "rows.cuh"
