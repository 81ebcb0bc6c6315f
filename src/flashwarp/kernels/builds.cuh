// Which built-in kernels a program has: all, or those that it names.
//
// What the package does not have compiled for a GPU is compiled when it is first launched, and a
// kernel alone takes a third of the time of all.
#pragma once

#ifndef FW_ALL_KERNELS
#define FW_ALL_KERNELS 1
#endif

// With -DFW_ALL_KERNELS=0 -DFW_ONLY_gather_rows=1, only `fw_gather_rows`.
#define FW_BUILDS(name) (FW_ALL_KERNELS || FW_ONLY_##name)

// All lanes of a warp run these kernels together: see base/staging.cuh.
#define FW_WHOLE_WARPS 1
