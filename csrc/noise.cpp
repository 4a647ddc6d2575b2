#include "noise.h"

#include <cmath>
#include <limits>

#include "kernels.h"

namespace foredraft {
namespace {

// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
void philox(uint32_t counter[4], uint64_t seed) {
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = uint64_t{0xD2511F53} * counter[0], second = uint64_t{0xCD9E8D57} * counter[2];
        const uint32_t next[4] = {static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(second),
                                  static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(first)};
        for (int i = 0; i < 4; ++i) counter[i] = next[i];
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
}

double from_word(uint32_t word) { return (static_cast<double>(word) + 0.5) * 0x1p-32; }
double gumbel(double u) { return -std::log(-std::log(u)); }

// The words of four neighbouring tokens.
void words(int64_t block, uint64_t seed, uint64_t position, uint32_t stream, uint32_t out[4]) {
    out[0] = static_cast<uint32_t>(block);
    out[1] = static_cast<uint32_t>(position);
    out[2] = static_cast<uint32_t>(position >> 32);
    out[3] = stream;
    philox(out, seed);
}

}  // namespace

void uniform(uint64_t seed, uint64_t position, const int64_t* ids, int count, uint32_t stream, double* out) {
    for (int i = 0; i < count; ++i) {
        uint32_t drawn[4];
        words(ids[i] >> 2, seed, position, stream, drawn);
        out[i] = from_word(drawn[ids[i] & 3]);
    }
}

int gumbel_argmax(const float* scores, int count, uint64_t seed, uint64_t position, uint32_t stream) {
    const int top = kernels().argmax(scores, count);
    if (!std::isfinite(scores[top])) return -1;
    const double most = gumbel(1.0 - 0x1p-33);
    double best = -std::numeric_limits<double>::infinity();
    int winner = -1;
    const auto consider = [&](int first, int last, double least) {
        for (int block = first & ~3; block < last; block += 4) {
            bool any = false;
            for (int i = block; i < block + 4 && i < count; ++i) any |= static_cast<double>(scores[i]) >= least;
            if (!any) continue;
            uint32_t drawn[4];
            words(block >> 2, seed, position, stream, drawn);
            for (int i = block; i < block + 4 && i < count; ++i) {
                if (scores[i] == -std::numeric_limits<float>::infinity()) continue;
                const double value = static_cast<double>(scores[i]) + gumbel(from_word(drawn[i & 3]));
                if (value > best || (value == best && i < winner)) {
                    best = value;
                    winner = i;
                }
            }
        }
    };
    // The likeliest token's own draw bounds what can win; the margin covers rounding.
    consider(top, top + 1, -std::numeric_limits<double>::infinity());
    for (int begin = 0; begin < count; begin += 64) {
        const int end = begin + 64 < count ? begin + 64 : count;
        const double least = best - most - 1e-9;
        float highest = scores[begin];
        for (int i = begin + 1; i < end; ++i) highest = scores[i] > highest ? scores[i] : highest;
        if (static_cast<double>(highest) >= least) consider(begin, end, least);
    }
    return winner;
}

}  // namespace foredraft
