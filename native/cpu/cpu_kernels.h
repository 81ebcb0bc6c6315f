// Where host and device keep the members of the structures that they share.
#pragma once

#include <cstddef>
#include <vector>

namespace fw::native {

// Sizes and member offsets of every structure that Python mirrors, for the test that compares them.
struct MemberLayout {
  const char* structure;
  const char* member;  // empty: the entry gives the size
  std::size_t bytes;
};
const std::vector<MemberLayout>& structure_layouts();

}  // namespace fw::native
