// The sampler's noise: Philox4x32-10 keyed by (seed, position, token id, stream), as engine/noise.py defines it.
#pragma once

#include <cstdint>

namespace foredraft {

// The token with the highest score plus standard Gumbel noise; of equals the lowest. Scores of -inf never win; -1 if
// the highest score is NaN or infinite.
int gumbel_argmax(const float* scores, int count, uint64_t seed, uint64_t position, uint32_t stream);

}  // namespace foredraft
