// Commands of a volume that move no line: Flush, Write Zeroes, Dataset Management.
#pragma once

#include "flashwarp/cache/line_command.cuh"

namespace fw::cache {

// Namespaces of a volume, and a queue pair of each.
FW_DEVICE uint32_t namespaces_of(const volume& v) {
  return v.spread == kOneNamespace ? 1 : v.namespace_count;
}
FW_DEVICE nvme::queue_pair& queue_of_namespace(const volume& v, uint32_t n) {
  return v.queues[v.spread == kOneNamespace ? 0 : v.spans[n].first];
}

// Submits one command, to which this adds the identifier, and waits for it. All lanes of `here`
// call. Returns its status.
FW_DEVICE_NOINLINE uint32_t run_command(line_cache& c, nvme::queue_pair& q, lanes here,
                                        const nvme::command& wanted) {
  line_finisher finisher{c};
  const lanes members = here.first();
  const bool leads = here.leads();
  const uint32_t ticket = nvme::take_tickets(q, here, members);
  if (!nvme::wait_for_slots(q, here, members, ticket, finisher)) return nvme::kTimedOut;
  if (leads) {
    nvme::command entry = wanted;
    entry.opcode_cid |= nvme::entry_of(q, ticket) << 16;
    nvme::write_entry(q, ticket, entry, 0);
  }
  here.sync();
  nvme::publish(q, here);
  const uint32_t status = nvme::wait_for_completions(q, here, members, ticket, finisher);
  if (leads && status != nvme::kTimedOut) nvme::release_slot(q, ticket);
  return here.broadcast(status);
}

// Makes what was written to the namespaces of a volume durable. All lanes of `here` call. Returns
// the first failure.
FW_DEVICE uint32_t flush_namespaces(line_cache& c, volume& v, lanes here) {
  nvme::command entry = {};
  entry.opcode_cid = nvme::kFlush;
  entry.nsid = nvme::kNamespaceId;
  uint32_t status = nvme::kSuccess;
  for (uint32_t n = 0; n < namespaces_of(v); n++) {
    const uint32_t got = run_command(c, queue_of_namespace(v, n), here, entry);
    if (got == nvme::kSuccess) continue;
    if (here.leads()) record_error(v, got, nvme::kFlush, v.line_begin);
    if (status == nvme::kSuccess) status = got;
  }
  return status;
}

}  // namespace fw::cache
