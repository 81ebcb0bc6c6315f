// The built-in kernels, compiled for the CPU device with the replacement policy FW_POLICY: one
// library for each policy. This is the only list of the kernels.
#include "flashwarp/kernels/module.cuh"

#include "flashwarp/entry.cuh"

namespace {

#define FW_ENTRY(NAME) fw::make_entry<&NAME>(#NAME)

constexpr fw::entry kEntries[] = {
    FW_ENTRY(fw_gather_rows),         FW_ENTRY(fw_scatter_rows),
    FW_ENTRY(fw_prefetch_rows),       FW_ENTRY(fw_gather_elements_1),
    FW_ENTRY(fw_gather_elements_2),   FW_ENTRY(fw_gather_elements_4),
    FW_ENTRY(fw_gather_elements_8),   FW_ENTRY(fw_gather_elements_16),
    FW_ENTRY(fw_scatter_elements_1),  FW_ENTRY(fw_scatter_elements_2),
    FW_ENTRY(fw_scatter_elements_4),  FW_ENTRY(fw_scatter_elements_8),
    FW_ENTRY(fw_scatter_elements_16), FW_ENTRY(fw_check_indices),
    FW_ENTRY(fw_flush_lines),         FW_ENTRY(fw_invalidate_lines),
    FW_ENTRY(fw_drop_tier),           FW_ENTRY(fw_quiesce),
    FW_ENTRY(fw_submit_command),      FW_ENTRY(fw_refresh_lines),
    FW_ENTRY(fw_look_up_rows),        FW_ENTRY(fw_look_up_bags),
    FW_ENTRY(fw_prefetch_ids),        FW_ENTRY(fw_fetch_ids),
    FW_ENTRY(fw_sum_gradients),       FW_ENTRY(fw_update_rows),
    FW_ENTRY(fw_stream_rows),         FW_ENTRY(fw_gather_cells),
};

}  // namespace

extern "C" __attribute__((visibility("default")))
const fw::entry_table fw_entries = {kEntries, sizeof(kEntries) / sizeof(fw::entry)};
