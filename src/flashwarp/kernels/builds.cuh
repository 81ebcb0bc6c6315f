// Which built-in kernels a program has: all, or those that it names.
//
// A GPU's compiler gives each kernel a copy of every function that any of them may call through a
// pointer. So one program of all kernels takes longer to compile than all kernels one by one.
#pragma once

#ifndef FW_ALL_KERNELS
#define FW_ALL_KERNELS 1
#endif

// With -DFW_ALL_KERNELS=0 -DFW_ONLY_gather_rows=1, only `fw_gather_rows`.
#define FW_BUILDS(name) (FW_ALL_KERNELS || FW_ONLY_##name)
