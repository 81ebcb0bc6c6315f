// What kernel authors include: arrays larger than memory, for use in kernels.
//
//   fw::array<float> data;                    float x = data[i];  data.store(i, x);
//   fw::array<float, 2> grid;                 float y = grid(row, column);
//   fw::cursor<float> line(data);             loads from one line look at its tag once each
//   fw::each(data, [&](uint64_t i, float z) { .. });  every element once, by all threads
//   for (float z : fw::range(data, 0, n))     in order, by one thread; prefetches the lines ahead
//   fw::warp::read(data, i, n, buffer);       all lanes of a warp, or of a block, together
//   fw::token t = data.read_async(i, n, buffer);  compute();  t.wait();
#pragma once

#include "flashwarp/array/async.cuh"
#include "flashwarp/array/cursor.cuh"
#include "flashwarp/array/range.cuh"
#include "flashwarp/array/span.cuh"
#include "flashwarp/array/view.cuh"
