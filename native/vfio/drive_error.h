// What goes wrong with a drive, with what a caller needs to choose a typed exception.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace fw::native::vfio {

class DriveError : public std::runtime_error {
 public:
  enum class Kind {
    kSystem,   // a call of the operating system failed: `error` is its errno
    kTimeout,  // the controller did not answer in time
    kLost,     // fatal status, removed, reset or closed: nothing completes any more
    kStatus,   // a command completed with an error: `status`
    kUnfit,    // the drive cannot do what was asked for
  };
  DriveError(Kind what_kind, const std::string& text, int error_number = 0,
             uint16_t status_field = 0)
      : std::runtime_error(text), kind(what_kind), error(error_number), status(status_field) {}

  const Kind kind;
  const int error;
  const uint16_t status;
};

}  // namespace fw::native::vfio
