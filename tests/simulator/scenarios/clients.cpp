// A client of a shared cache: gathers what is resident, beside the owner's threads.
#include "flashwarp/kernels/resident.cuh"
#include "simulator/elements.h"

using namespace fw::simulator;

namespace {

// One launch of the client's kernel. What it lists counts as a load that failed: the owner would
// hand the bytes over.
class ClientJob {
 public:
  ClientJob(Machine& machine, Elements<>& data, uint32_t row_words, uint32_t rows, Random& random)
      : data_(data), row_words_(row_words) {
    for (uint32_t k = 0; k < rows; ++k) {
      indices_.push_back(random.below(data.length() / row_words));
    }
    values_.assign(size_t(rows) * row_words, 0);
    list_.resize(size_t(rows) * 2);
    words_ = machine.allocate<uint64_t>(sizeof(fw::kernels::missed_pieces) / 8, "missed",
                                        Sharing::kAtomic);
  }

  // By every thread of the job, which are `count`.
  void run(uint32_t index, uint32_t count) {
    become(index, count);
    if (running_++ == 0) {
      for (size_t i = 0; i < values_.size(); ++i) {
        operations_.push_back(data_.begin(element(i), false, 0));
      }
    }
    fw_gather_resident(params());
    if (++done_ == count) end();
  }

 private:
  uint32_t element(size_t i) const {
    return uint32_t(indices_[i / row_words_]) * row_words_ + uint32_t(i % row_words_);
  }

  void end() {
    const uint64_t missed = words_[0];
    if (missed > list_.size()) scheduler.fail("a piece was listed twice");
    for (uint64_t k = 0; k < missed; ++k) take_back(list_[k]);
    for (size_t i = 0; i < values_.size(); ++i) data_.end(operations_[i], element(i), values_[i]);
  }

  // Forgets the words of a row in a line, which must be one that the row touches.
  void take_back(const fw::kernels::missed_piece& piece) {
    const uint64_t row = piece.item / segments();
    bool found = false;
    for (size_t i = row * row_words_; i < (row + 1) * row_words_; ++i) {
      if (uint64_t(element(i)) * 8 / kLineBytes != piece.line) continue;
      values_[i] = 0;
      found = true;
    }
    if (!found) scheduler.fail("a listed piece is of another line");
  }

  uint32_t segments() const { return kLineBytes % (row_words_ * 8) == 0 ? 1 : 2; }

  fw::kernels::client_params params() {
    const fw::array<uint64_t>& a = data_.array();
    fw::kernels::client_params c = {};
    c.rows.geometry = a.geometry;
    c.rows.indices = indices_.data();
    c.rows.index_count = indices_.size();
    c.rows.rows = reinterpret_cast<char*>(values_.data());
    c.rows.row_bytes = row_words_ * 8;
    c.rows.row_count = a.length / row_words_;
    c.rows.from_end = c.rows.row_count;
    c.rows.index_bytes = 8;
    c.rows.bundle = 1 + uint32_t(indices_.size() % kWidth);
    c.rows.segments = segments();
    c.line_begin = a.line_begin;
    c.missed = reinterpret_cast<fw::kernels::missed_pieces*>(words_);
    c.list = list_.data();
    return c;
  }

  Elements<>& data_;
  const uint32_t row_words_;
  std::vector<int64_t> indices_;
  std::vector<uint64_t> values_;
  std::vector<uint32_t> operations_;
  std::vector<fw::kernels::missed_piece> list_;
  uint64_t* words_;
  uint32_t running_ = 0;
  uint32_t done_ = 0;
};

}  // namespace

FW_SCENARIO(clients, "a client gathers resident rows, while the owner stores and evicts") {
  Shape shape = Shape::draw(run.random);
  shape.volumes = 1;
  shape.sets = 1;
  shape.lines = 5 + run.random.below(3);
  Machine machine(run, shape);
  Elements<> data(machine, 0);
  constexpr uint32_t kRowWords[] = {1, 3, 8, 64};
  for (uint32_t round = 0; round < 3; ++round) {
    const uint32_t words = run.random.pick(kRowWords);
    ClientJob client(machine, data, words, 1 + run.random.below(words == 64 ? 3 : 6), run.random);
    machine.launch([&](Thread& t) {
      if (t.warp == 0) return client.run(t.index, kWidth);
      for (uint32_t n = 0; n < 4; ++n) {
        data.use(t.random);
      }
    });
    data.check();
    machine.settle();
  }
}
