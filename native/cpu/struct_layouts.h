// Sizes and member offsets of the structures that Python mirrors, for the test that compares them.
#pragma once

#include <cstddef>
#include <vector>

namespace fw::native {

struct MemberLayout {
  const char* structure;
  const char* member;  // empty: `bytes` is the structure's size
  std::size_t bytes;
};
const std::vector<MemberLayout>& structure_layouts();

}  // namespace fw::native
