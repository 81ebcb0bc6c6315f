// Which built-in kernels a program has: all, or those that it names. A GPU's compiler gives each
// kernel a copy of every function that any of them may call through a pointer, so a program of all
// kernels takes twice as long as each alone, and a program of one seconds instead of a minute.
#pragma once

#ifndef FW_ALL_KERNELS
#define FW_ALL_KERNELS 1
#endif

// With -DFW_ALL_KERNELS=0 -DFW_ONLY_gather_rows=1, only `fw_gather_rows`.
#define FW_BUILDS(name) (FW_ALL_KERNELS || FW_ONLY_##name)
