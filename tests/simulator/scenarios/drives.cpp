// Warps read raw blocks of two drives and keep more bundles outstanding than the rings hold: a warp
// that waits for a slot must not hold one.
#include "benchmarks/drives/drives.cuh"
#include "simulator/machine.h"

using namespace fw::simulator;

namespace {

constexpr uint32_t kBlocksLog2 = 3;
constexpr uint32_t kBlocks = 1 << kBlocksLog2;
constexpr uint32_t kBufferLog2 = 8;  // room for every command's data
constexpr uint32_t kWords = kLineBytes / 8;

uint64_t word_of(uint32_t volume, uint32_t block, uint32_t i) {
  return uint64_t(volume + 1) << 40 | uint64_t(block) << 20 | i;
}

Shape draw_shape(Random& random) {
  Shape shape = Shape::draw(random);
  shape.volumes = 2;
  shape.path = fw::nvme::kInPlace;
  shape.lines = kBlocks + 1;  // the last one is partial
  // A bundle has as many commands as a warp has lanes.
  shape.depth_log2 = random.below(2) + (kWidth == 32 ? 5 : kWidth == 4 ? 2 : 1);
  return shape;
}

}  // namespace

FW_SCENARIO(drives, "windows of raw commands over two drives, larger than the rings") {
  const Shape shape = draw_shape(run.random);
  Machine machine(run, shape);
  std::vector<bench::drive> drives;
  for (uint32_t v = 0; v < shape.volumes; ++v) {
    drives.push_back({machine.volume(v).queues, shape.queues});
    auto* stored = reinterpret_cast<uint64_t*>(machine.storage(v));
    for (uint32_t b = 0; b < kBlocks; ++b) {
      for (uint32_t i = 0; i < kWords; ++i) stored[b * kWords + i] = word_of(v, b, i);
    }
  }
  std::vector<uint64_t> buffer(kWords << kBufferLog2);
  uint64_t failed = 0;
  bench::drives_params p = {};
  p.drives = drives.data();
  p.failed = &failed;
  p.buffer = reinterpret_cast<char*>(buffer.data());
  p.commands = 1 + run.random.below(kWidth == 32 ? 70 : 14);
  p.seed = run.random.below(1000);
  p.drive_count = shape.volumes;
  p.blocks_log2 = kBlocksLog2;
  p.buffer_log2 = kBufferLog2;
  p.block_bytes = kLineBytes;
  p.window = 1 + run.random.below(5);
  p.opcode = fw::nvme::kRead;

  machine.launch([&](Thread&) { drive_blocks(p); });
  machine.settle();

  if (failed != 0) scheduler.fail("a command failed without a fault");
  for (uint32_t v = 0; v < shape.volumes; ++v) {
    for (uint64_t j = 0; j < p.commands && j < kBlocks; ++j) {
      const uint32_t block = uint32_t(bench::scatter_block(j, p.seed + v, kBlocksLog2));
      const uint64_t* data = &buffer[bench::buffer_block(p, j, v) * kWords];
      for (uint32_t i = 0; i < kWords; ++i) {
        if (data[i] != word_of(v, block, i)) scheduler.fail("a command brought another block");
      }
    }
  }
}
