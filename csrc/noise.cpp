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

int gumbel_argmax(const float* scores, int count, uint64_t seed, uint64_t position, uint32_t stream) {
    const Kernels& k = kernels();
    const int top = k.argmax(scores, count);
    if (!std::isfinite(scores[top])) return -1;
    double best = -std::numeric_limits<double>::infinity();
    int winner = -1;
    uint32_t words[64];
    float padded[64];
    const auto consider = [&](int first) {
        const float* own = scores + first;
        if (first + 64 > count) {
            std::fill(padded, padded + 64, -std::numeric_limits<float>::infinity());
            std::copy(own, scores + count, padded);
            own = padded;
        }
        k.noise_words(first, seed, position, stream, words);
        // Rounded down and lowered, so that no float rounding loses a winner.
        const float least = static_cast<float>(best - 1e-4 * (1.0 + std::fabs(best)));
        uint64_t left = std::isfinite(best) ? k.contenders(own, words, least) : ~uint64_t{0};
        for (; left; left &= left - 1) {
            const int lane = std::countr_zero(left), token = first + lane;
            if (token >= count || own[lane] == -std::numeric_limits<float>::infinity()) continue;
            const double value = static_cast<double>(own[lane]) + gumbel(from_word(words[lane]));
            if (value > best || (value == best && token < winner)) {
                best = value;
                winner = token;
            }
        }
    };
    // The likeliest token's neighbourhood gives a bound that most others cannot reach.
    consider(top / 64 * 64);
    for (int first = 0; first < count; first += 64)
        if (first != top / 64 * 64) consider(first);
    return winner;
}

}  // namespace foredraft
