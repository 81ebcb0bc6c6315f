// What kernel authors include: files that kernels read and write at byte offsets.
//
//   fw::file f;  int64_t got = fw::read(f, buffer, offset, nbytes);   one thread
//   fw::warp::read(f, buffer, offset, nbytes);                        all lanes of a warp together
//   fw::block::write(f, buffer, offset, nbytes);                      all threads of a block
//   together fw::append(f, record, sizeof record);   fw::warp::flush(f, offset, nbytes);
#pragma once

#include "flashwarp/array.cuh"
#include "flashwarp/file/file_calls.cuh"
