// Every built-in kernel in one translation unit, which is a program like any other. The wheel has
// all of them compiled for the CPU device, and may have them for GPUs.
#pragma once

#include "cells.cuh"
#include "elements.cuh"
#include "maintenance.cuh"
#include "rows.cuh"
#include "stream.cuh"
#include "table.cuh"
#include "table_ids.cuh"
#include "update.cuh"
