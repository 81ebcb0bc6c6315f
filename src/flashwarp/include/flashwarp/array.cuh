// What kernel authors include: arrays larger than memory, in the hands of a kernel.
//
//   fw::array<float> data;                    float x = data[i];  data.store(i, x);
//   fw::array<float, 2> grid;                 float y = grid(row, column);
//   fw::cursor<float> line(data);             loads that stay on a line cost one look at its tag
//   for (float z : fw::range(data, 0, n))     in order, with the lines ahead on their way
//   fw::warp::read(data, i, n, buffer);       all lanes of a warp, or of a block, together
//   fw::token t = data.read_async(i, n, buffer);  compute();  t.wait();
#pragma once

#include "flashwarp/array/async.cuh"
#include "flashwarp/array/cursor.cuh"
#include "flashwarp/array/span.cuh"
#include "flashwarp/array/view.cuh"
