// Records, spans and asynchronous transfers, which move several elements.
#include "flashwarp/array.cuh"
#include "simulator/elements.h"

using namespace fw::simulator;

namespace {

using Words = Elements<uint64_t>;

// Three words: straddles lines of 64 words at every third line.
struct Triple {
  uint64_t words[3];
};

fw::array<Triple> triples_of(const fw::array<uint64_t>& a) {
  return {a.geometry, a.cache, a.volume, a.line_begin, a.length / 3};
}

// A few elements around `i`, as a thread would ask for them.
struct Around {
  uint32_t begin, count, at;
  Around(const Words& data, uint32_t i, Random& random) {
    begin = i - std::min(i, random.below(3));
    count = std::min(i - begin + 1 + random.below(3), data.length() - begin);
    at = i - begin;
  }
};

uint64_t load_triple(const fw::array<uint64_t>& a, uint32_t i) {
  const fw::array<Triple> triples = triples_of(a);
  return i / 3 < triples.length ? triples[i / 3].words[i % 3] : a[i];
}

uint64_t read_later(const Words& data, uint32_t i, Random& random, bool may_fail) {
  uint64_t buffer[6] = {};
  const Around part(data, i, random);
  fw::token t = data.array().read_async(part.begin, part.count, buffer);
  const uint32_t polls = random.below(4);
  for (uint32_t n = 0; n < polls && !t.done(); ++n) fw::base::pause(0);
  const uint32_t status = t.wait();
  if (status != t.wait()) scheduler.fail("a token has two statuses");
  if (status != fw::nvme::kSuccess && !may_fail) scheduler.fail("a token failed without a fault");
  return status == fw::nvme::kSuccess ? buffer[part.at] : 0;
}

uint64_t read_in_order(const Words& data, uint32_t i, Random& random) {
  const Around part(data, i, random);
  uint64_t result = 0;
  fw::range<uint64_t> elements(data.array(), part.begin, part.begin + part.count);
  for (auto e = elements.begin(); e != elements.end(); ++e) {
    const uint64_t value = *e;
    if (e.index() == i) result = value;
  }
  return result;
}

uint32_t write_later(const Words& data, uint32_t i, uint64_t value, Random& random) {
  fw::token t = data.array().write_async(i, 1, &value);
  const uint32_t polls = random.below(4);
  for (uint32_t n = 0; n < polls && !t.done(); ++n) fw::base::pause(0);
  return t.wait();
}

// Overwrites a whole line, which is not read for it, element by element of the history.
void write_line(Words& data, uint32_t line, Random& random) {
  constexpr uint32_t kWords = kLineBytes / sizeof(uint64_t);
  const uint32_t first = line * kWords;
  const uint32_t count = std::min(kWords, data.length() - first);
  uint64_t values[kWords];
  uint32_t operations[kWords];
  for (uint32_t k = 0; k < count; ++k) {
    values[k] = data.next_value(first + k);
    operations[k] = data.begin(first + k, true, values[k]);
  }
  fw::token t = data.array().write_async(first, count, values);
  if (random.chance(50)) t.done();
  const bool stored = t.wait() == fw::nvme::kSuccess;
  for (uint32_t k = 0; k < count; ++k) data.end(operations[k], first + k, stored ? values[k] : 0);
}

void use_spans(Run& run, const Shape& shape, uint32_t operations) {
  Machine machine(run, shape);
  Words data(machine, 0);
  machine.launch([&](Thread& t) {
    fw::token dropped[4];
    for (uint32_t n = 0; n < operations; ++n) {
      const uint32_t i = data.pick(t.random);
      switch (t.random.below(9)) {
        case 0:
          data.load_by(i, "load as a part of a record",
                       [&](uint32_t j) { return load_triple(data.array(), j); });
          break;
        case 1:
        case 2:
          data.load_by(i, "read later",
                       [&](uint32_t j) { return read_later(data, j, t.random, machine.faulty()); });
          break;
        case 3:
          data.load_by(i, "read in order",
                       [&](uint32_t j) { return read_in_order(data, j, t.random); });
          break;
        case 4:
          data.store_by(i, "write later", [&](uint32_t j, uint64_t value) {
            return write_later(data, j, value, t.random);
          });
          break;
        case 5:
          if (kWidth == 1) {
            write_line(data, i / (kLineBytes / sizeof(uint64_t)), t.random);
          } else {
            data.load(i);
          }
          break;
        case 6:
          dropped[n % 4] = data.array().prefetch(i, 1 + t.random.below(130));
          break;
        case 7:
          dropped[n % 4] = data.array().write_back(i, 1);
          if (t.random.chance(50)) dropped[n % 4].wait();
          break;
        default:
          data.store(i);
      }
    }
  });
  data.check();
  machine.settle();
}

}  // namespace

FW_SCENARIO(spans, "records, ranges and tokens over a cache of a few frames") {
  const Shape shape = Shape::draw(run.random);
  if (run.random.chance(40)) {
    draw_faults(run);
    // Where most transfers of 64 lanes fail, a launch takes millions of steps.
    if (kWidth == 32) run.faults.errors = std::min(run.faults.errors, 20u);
  }
  use_spans(run, shape, kWidth == 1 ? 1 + run.random.below(4) : 1 + run.random.below(2));
}

FW_SCENARIO(counters, "additions to a few elements, none of which may be lost") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  Machine machine(run, shape);
  const fw::array<uint64_t> data = machine.array<uint64_t>();
  auto* stored = reinterpret_cast<uint64_t*>(machine.storage());
  constexpr uint32_t kCounters = 3;
  uint64_t sums[kCounters] = {};
  machine.launch([&](Thread& t) {
    for (uint32_t n = 0; n < (kWidth == 32 ? 1u : 3u); ++n) {
      const uint32_t counter = t.random.below(kCounters);
      // One a line: they push each other out where a set is small.
      const uint64_t i = uint64_t(counter) * (shape.lines - 1) / kCounters * 64;
      const uint64_t value = 1 + t.random.below(100);
      sums[counter] += value;
      data.atomic_add(i, value);
    }
  });
  machine.at_rest([&] {
    uint64_t expected[kCounters] = {};
    uint64_t got[kCounters] = {};
    for (uint32_t c = 0; c < kCounters; ++c) {
      const uint64_t i = uint64_t(c) * (shape.lines - 1) / kCounters * 64;
      got[c] = stored[i];
      for (uint32_t d = 0; d < kCounters; ++d) {
        if (uint64_t(d) * (shape.lines - 1) / kCounters * 64 == i) expected[c] += sums[d];
      }
    }
    for (uint32_t c = 0; c < kCounters; ++c) {
      if (got[c] != expected[c]) scheduler.fail("an addition was lost");
    }
  });
  machine.settle();
}
