#include "noise.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels.h"

namespace foredraft {
namespace {

double from_word(uint32_t word) { return (static_cast<double>(word) + 0.5) * 0x1p-32; }
double gumbel(double u) { return -std::log(-std::log(u)); }

}  // namespace

int gumbel_argmax(const float* scores, const int64_t* ids, int count, uint64_t seed, uint64_t position,
                  uint32_t stream) {
    const Kernels& k = kernels();
    const int top = k.argmax(scores, count);
    if (!std::isfinite(scores[top])) return -1;
    constexpr float lowest = -std::numeric_limits<float>::infinity();
    double best = -std::numeric_limits<double>::infinity();
    int winner = -1;
    uint32_t words[64];
    float padded[64];
    int indices[64];
    // Scores of tokens `first` to `first` + 63; index_of: where a lane's score stands.
    const auto consider = [&](uint64_t first, const float* own, const auto& index_of) {
        k.noise_words(first, seed, position, stream, words);
        // Rounded down and lowered, so that no float rounding loses a winner.
        const float least = static_cast<float>(best - 1e-4 * (1.0 + std::fabs(best)));
        uint64_t left = std::isfinite(best) ? k.contenders(own, words, least) : ~uint64_t{0};
        for (; left; left &= left - 1) {
            const int lane = std::countr_zero(left);
            if (own[lane] == lowest) continue;
            const int index = index_of(lane);
            const double value = static_cast<double>(own[lane]) + gumbel(from_word(words[lane]));
            if (value > best || (value == best && index < winner)) {
                best = value;
                winner = index;
            }
        }
    };
    const auto chunk_of = [&](int index) { return static_cast<uint64_t>(ids[index]) / 64; };
    // Considers the scores from `begin` on whose tokens lie in the same 64, and returns the end of these.
    const auto consider_from = [&](int begin) {
        if (!ids) {
            const float* own = scores + begin;
            if (begin + 64 > count) {
                std::fill(padded, padded + 64, lowest);
                std::copy(own, scores + count, padded);
                own = padded;
            }
            consider(begin, own, [&](int lane) { return begin + lane; });
            return begin + 64;
        }
        const uint64_t chunk = chunk_of(begin);
        int end = begin;
        std::fill(padded, padded + 64, lowest);
        for (; end < count && chunk_of(end) == chunk; ++end) {
            const int lane = static_cast<int>(ids[end] & 63);
            padded[lane] = scores[end];
            indices[lane] = end;
        }
        consider(chunk * 64, padded, [&](int lane) { return indices[lane]; });
        return end;
    };
    // The likeliest token's neighbourhood gives a bound that most others cannot reach.
    int likely = top / 64 * 64;
    if (ids)
        for (likely = top; likely > 0 && chunk_of(likely - 1) == chunk_of(top);) --likely;
    const int after = consider_from(likely);
    for (int at = 0; at < count;) at = at == likely ? after : consider_from(at);
    return winner;
}

}  // namespace foredraft
