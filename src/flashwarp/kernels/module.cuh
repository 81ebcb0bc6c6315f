// Every built-in kernel in one translation unit, which is a program like any other. The wheel has
// all of them compiled for the CPU device; on a GPU each is compiled alone when it is first used.
#pragma once

#include "maintenance.cuh"
#include "rows.cuh"
