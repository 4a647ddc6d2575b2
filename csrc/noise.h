// The sampler's noise: Philox4x32-10 keyed by (seed, position, token id, stream), as ops/noise.py defines it.
#pragma once

#include <cstdint>

namespace foredraft {

// The index of the highest score plus standard Gumbel noise; of equals the lowest. Scores of -inf never win; -1 if the
// highest score is NaN or infinite. ids: the token of each score, whose noise it gets; null where that is its index.
int gumbel_argmax(const float* scores, const int64_t* ids, int count, uint64_t seed, uint64_t position,
                  uint32_t stream);

}  // namespace foredraft
