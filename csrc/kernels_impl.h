// The kernels, in terms of simd.h: included once per instruction set.
#include <algorithm>
#include <limits>

#include "kernels.h"
#include "simd.h"

namespace FOREDRAFT_ISA {
namespace {

using foredraft::Activations;
using foredraft::Format;
using foredraft::kBlock;
using foredraft::KVView;
using foredraft::kPanel;
using foredraft::kPositions;
using foredraft::kQueries;
using foredraft::kStep;
using foredraft::MatrixView;
using foredraft::Peak;
using foredraft::QueryTile;

constexpr int kHalf = 16;  // columns of half a panel, in which MXFP4 is stored

// 2 x E2M1 plus 12, and E2M1 in bfloat16.
alignas(16) constexpr uint8_t kCodeBytes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
alignas(32) constexpr uint16_t kCodeWords[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
constexpr int kMxfp4Offset = 12;
constexpr int kInt8Offset = 128;

// The most rows of a tile, and the vectors of columns that it takes at once: as many as the registers hold. Columns that
// share a broadcast activation save its load, which is what limits the arithmetic.
#if defined(__AVX512F__)
constexpr int kMaxRowsBf16 = 8, kMaxRowsA16 = 6, kMaxRowsBytes = 4, kColumnVectors = 2;
#else
constexpr int kMaxRowsBf16 = 4, kMaxRowsA16 = 4, kMaxRowsBytes = 4, kColumnVectors = 1;
#endif

// Rows whose activations stay in the second-level cache while the panels pass by.
constexpr int kRowBlock = 96;

struct Output {
    float* out;
    size_t stride;
    const float* bias;
    bool accumulate;
    int columns;  // of this panel that exist

    // `total` holds W columns from `column` of the panel, for `row`.
    void put(int row, int column, VF total) const {
        float* to = out + row * stride + column;
        if (bias) total = add(total, load(bias + column));
        if (column + W <= columns) {
            store(to, accumulate ? add(load(to), total) : total);
            return;
        }
        float lanes[W];
        store(lanes, total);
        for (int i = 0; column + i < columns; ++i) to[i] = accumulate ? to[i] + lanes[i] : lanes[i];
    }
};

// How far ahead of a single pass over the panels memory is fetched, and how much of a matrix before its first panel.
constexpr size_t kAheadBytes = 8 << 10, kFirstBytes = 16 << 10;

// Fetches memory that comes next while a panel is multiplied, on each visit of a block so many cache lines: in a single
// pass what lies kAheadBytes further on, in several passes over the panel the next panel.
class Ahead {
   public:
    Ahead(const MatrixView& w, int panel, int passes, int visits) : once_(w.streamed && passes == 1) {
        const size_t bytes = w.blocks * block_bytes(w.format), scales = w.blocks * scale_bytes(w.format);
        const uint8_t* end = w.data + w.panels * bytes;
        at_ = std::min(w.data + panel * bytes + (passes == 1 ? kAheadBytes : bytes), end);
        end_ = std::min(at_ + bytes, end);
        scale_at_ = w.scales + std::min(panel + 1, w.panels) * scales;
        scale_end_ = panel + 1 < w.panels ? scale_at_ + scales : scale_at_;
        lines_ = (static_cast<int>(bytes / 64) + visits - 1) / visits;
    }
    void fetch() {
        for (int i = 0; i < lines_ && at_ < end_; ++i, at_ += 64) once_ ? prefetch_once(at_) : prefetch(at_);
        if (scale_at_ < scale_end_) {
            prefetch(scale_at_);
            scale_at_ += 64;
        }
    }

   private:
    const bool once_;
    const uint8_t *at_, *end_, *scale_at_, *scale_end_;
    int lines_;
};

// Where the columns from `column` of a panel's block begin.
inline const uint8_t* half_block(const uint8_t* panel, Format format, int block, int column) {
    const uint8_t* start = panel + static_cast<size_t>(block) * block_bytes(format);
    return format == Format::int8 ? start + 4 * column
                                  : start + column / kHalf * (kBlock * kHalf / 2) + column % kHalf * 4;
}

template <int R>
void tile_bf16(const MatrixView& w, int panel, const Activations& x, int row, const Output& output, Ahead& ahead) {
    constexpr int C = kColumnVectors;
    const int stride = w.blocks * kBlock;
    const uint16_t* weights = reinterpret_cast<const uint16_t*>(w.data) + static_cast<size_t>(panel) * stride * kPanel;
    const uint16_t* rows = x.values + static_cast<size_t>(row) * stride;
    for (int column = 0; column < kPanel; column += C * W) {
        VF total[R][C];
        for (auto& each : total)
            for (VF& part : each) part = set(0.0f);
        for (int block = 0; block < w.blocks; ++block) {
            VF acc[R][C];
            for (auto& each : acc)
                for (VF& part : each) part = set(0.0f);
            const uint16_t* at = weights + (static_cast<size_t>(block) * kBlock * kPanel + 2 * column);
            ahead.fetch();
#pragma GCC unroll 4
            for (int pair = 0; pair < kBlock / 2; ++pair) {
                Pairs part[C];
                for (int c = 0; c < C; ++c) part[c] = load_pairs(at + pair * 2 * kPanel + c * 2 * W);
                for (int r = 0; r < R; ++r) {
                    const Pairs value = set_pairs(rows + static_cast<size_t>(r) * stride + block * kBlock + 2 * pair);
                    for (int c = 0; c < C; ++c) acc[r][c] = dot(acc[r][c], part[c], value);
                }
            }
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c) total[r][c] = add(total[r][c], acc[r][c]);
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) output.put(row + r, column + c * W, total[r][c]);
    }
}

template <int R>
void tile_mxfp4_a16(const MatrixView& w, int panel, const Activations& x, int row, const Output& output, Ahead& ahead) {
    constexpr int C = kColumnVectors;
    const int stride = w.blocks * kBlock;
    const uint8_t* codes = w.data + static_cast<size_t>(panel) * w.blocks * block_bytes(Format::mxfp4);
    const uint8_t* scales = w.scales + static_cast<size_t>(panel) * w.blocks * kPanel;
    const uint16_t* rows = x.values + static_cast<size_t>(row) * stride;
    const WordTable table(kCodeWords);
    for (int column = 0; column < kPanel; column += C * W) {
        VF total[R][C];
        for (auto& each : total)
            for (VF& part : each) part = set(0.0f);
        for (int block = 0; block < w.blocks; ++block) {
            ahead.fetch();
            const uint8_t* from[C];
            for (int c = 0; c < C; ++c) from[c] = half_block(codes, Format::mxfp4, block, column + c * W);
            VF acc[R][C];
            for (auto& each : acc)
                for (VF& part : each) part = set(0.0f);
            for (int group = 0; group < 4; ++group) {
                Pairs part[4][C];
                for (int c = 0; c < C; ++c) {
                    const uint8_t* words = from[c] + group * 4 * kHalf;
                    part[0][c] = table.at<0>(words);
                    part[1][c] = table.at<1>(words);
                    part[2][c] = table.at<2>(words);
                    part[3][c] = table.at<3>(words);
                }
                for (int pair = 0; pair < 4; ++pair)
                    for (int r = 0; r < R; ++r) {
                        const Pairs value = set_pairs(rows + static_cast<size_t>(r) * stride + block * kBlock +
                                                      8 * group + 2 * pair);
                        for (int c = 0; c < C; ++c) acc[r][c] = dot(acc[r][c], part[pair][c], value);
                    }
            }
            for (int c = 0; c < C; ++c) {
                const VF scale = load_e8m0(scales + block * kPanel + column + c * W);
                for (int r = 0; r < R; ++r) total[r][c] = madd(acc[r][c], scale, total[r][c]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) output.put(row + r, column + c * W, total[r][c]);
    }
}

template <bool four_bits, int R>
void tile_bytes(const MatrixView& w, int panel, const Activations& x, int row, const Output& output, Ahead& ahead) {
    constexpr Format format = four_bits ? Format::mxfp4 : Format::int8;
    constexpr int C = kColumnVectors;
    const int stride = w.blocks * kBlock;
    const uint8_t* weights = w.data + static_cast<size_t>(panel) * w.blocks * block_bytes(format);
    const uint8_t* scales = w.scales + static_cast<size_t>(panel) * w.blocks * scale_bytes(format);
    const int8_t* rows = x.bytes + static_cast<size_t>(row) * stride;
    const float* row_scales = x.scales + static_cast<size_t>(row) * w.blocks;
    const int32_t* offsets = x.offsets + static_cast<size_t>(row) * w.blocks;
    const ByteTable table(kCodeBytes);
    for (int column = 0; column < kPanel; column += C * W) {
        VF total[R][C];
        for (auto& each : total)
            for (VF& part : each) part = set(0.0f);
        for (int block = 0; block < w.blocks; ++block) {
            ahead.fetch();
            VI part[8][C];
            VF scale[C];
            for (int c = 0; c < C; ++c) {
                const int at = column + c * W;
                const uint8_t* from = half_block(weights, format, block, at);
                if constexpr (four_bits) {
                    for (int group = 0; group < 4; ++group) {
                        const VI codes = load_bytes(from + group * 4 * kHalf);
                        part[2 * group][c] = table.low(codes);
                        part[2 * group + 1][c] = table.high(codes);
                    }
                    scale[c] = load_e8m0(scales + block * kPanel + at);
                } else {
                    for (int quad = 0; quad < 8; ++quad) part[quad][c] = load_bytes(from + quad * 4 * kPanel);
                    scale[c] = load_bf16(reinterpret_cast<const uint16_t*>(scales) + block * kPanel + at);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const size_t index = static_cast<size_t>(r) * w.blocks + block;
                VI acc[C];
                for (VI& each : acc) each = seti(offsets[index]);
                for (int quad = 0; quad < 8; ++quad) {
                    const VI value = set_quad(rows + static_cast<size_t>(r) * stride + block * kBlock + 4 * quad);
                    for (int c = 0; c < C; ++c) acc[c] = dot<four_bits>(acc[c], part[quad][c], value);
                }
                const VF row_scale = set(row_scales[index]);
                for (int c = 0; c < C; ++c)
                    total[r][c] = madd(to_float(acc[c]), mul(scale[c], row_scale), total[r][c]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) output.put(row + r, column + c * W, total[r][c]);
    }
}

template <int R>
void tile_mxfp4(const MatrixView& w, int panel, const Activations& x, int row, const Output& output, Ahead& ahead) {
    tile_bytes<true, R>(w, panel, x, row, output, ahead);
}
template <int R>
void tile_int8(const MatrixView& w, int panel, const Activations& x, int row, const Output& output, Ahead& ahead) {
    tile_bytes<false, R>(w, panel, x, row, output, ahead);
}

using Tile = void (*)(const MatrixView&, int, const Activations&, int, const Output&, Ahead&);
constexpr Tile kTilesBf16[] = {tile_bf16<1>, tile_bf16<2>, tile_bf16<3>, tile_bf16<4>,
                               tile_bf16<5>, tile_bf16<6>, tile_bf16<7>, tile_bf16<8>};
constexpr Tile kTilesA16[] = {tile_mxfp4_a16<1>, tile_mxfp4_a16<2>, tile_mxfp4_a16<3>,
                              tile_mxfp4_a16<4>, tile_mxfp4_a16<5>, tile_mxfp4_a16<6>};
constexpr Tile kTilesMxfp4[] = {tile_mxfp4<1>, tile_mxfp4<2>, tile_mxfp4<3>, tile_mxfp4<4>};
constexpr Tile kTilesInt8[] = {tile_int8<1>, tile_int8<2>, tile_int8<3>, tile_int8<4>};

void linear(const MatrixView& w, const Activations& x, int rows, int first, int last, const float* bias,
            bool accumulate, float* out, size_t out_stride) {
    const Tile* tiles = w.format == Format::bf16    ? kTilesBf16
                        : w.format == Format::int8  ? kTilesInt8
                        : w.format == Format::mxfp4 ? kTilesMxfp4
                                                    : kTilesA16;
    const int most = w.format == Format::bf16        ? kMaxRowsBf16
                     : w.format == Format::mxfp4_a16 ? kMaxRowsA16
                                                     : kMaxRowsBytes;
    for (int begin = 0; begin < rows; begin += kRowBlock) {
        const int end = std::min(rows, begin + kRowBlock);
        const int parts = (end - begin + most - 1) / most;
        for (int panel = first; panel < last; ++panel) {
            const Output output{out + static_cast<size_t>(panel) * kPanel, out_stride,
                                bias ? bias + static_cast<size_t>(panel) * kPanel : nullptr, accumulate,
                                std::min(kPanel, w.n - panel * kPanel)};
            const int walks = kPanel / (kColumnVectors * W);
            Ahead ahead(w, panel, parts * walks, parts * walks * w.blocks);
            for (int part = 0; part < parts; ++part) {
                const int from = begin + (end - begin) * part / parts;
                const int to = begin + (end - begin) * (part + 1) / parts;
                tiles[to - from - 1](w, panel, x, from, output, ahead);
            }
        }
    }
}

void fetch(const MatrixView& w, int panel) {
    if (panel >= w.panels) return;
    const size_t bytes = w.blocks * block_bytes(w.format), scales = w.blocks * scale_bytes(w.format);
    for (size_t i = 0; i < std::min(bytes, kFirstBytes); i += 64) prefetch(w.data + panel * bytes + i);
    for (size_t i = 0; i < scales; i += 64) prefetch(w.scales + panel * scales + i);
}

void activate(const float* x, int k, int begin, int end, Format format, const Activations& to, int row) {
    const size_t stride = static_cast<size_t>(to.blocks) * kBlock;
    for (int at = begin; at < end; at += kBlock) {
        const float* values = x + at;
        float padded[kBlock] = {};
        if (at + kBlock > k) {
            std::copy(values, x + k, padded);
            values = padded;
        }
        if (!eight_bit_activations(format)) {
            for (int i = 0; i < kBlock; i += W) store_bf16(to.values + row * stride + at + i, load(values + i));
            continue;
        }
        // Infinity and NaN, which the maximum would drop, times 0 are NaN: then so is the scale.
        VF top = set(0.0f), broken = set(0.0f);
        for (int i = 0; i < kBlock; i += W) {
            top = max(top, abs(load(values + i)));
            broken = madd(load(values + i), set(0.0f), broken);
        }
        const bool four_bits = format == Format::mxfp4;
        const size_t index = static_cast<size_t>(row) * to.blocks + at / kBlock;
        if (any_nan(broken)) {
            std::memset(to.bytes + row * stride + at, 0, kBlock);
            to.scales[index] = std::numeric_limits<float>::quiet_NaN();
            to.offsets[index] = 0;
            continue;
        }
        const float largest_value = largest(top);
        const float inverse = largest_value > 1e-30f ? 127.0f / largest_value : 0.0f;
        int8_t* bytes = to.bytes + row * stride + at;
        VI total = seti(0);
        for (int i = 0; i < kBlock; i += W) {
            const VI rounded = round(mul(load(values + i), set(inverse)));
            total = addi(total, rounded);
            store_int8(bytes + i, rounded);
        }
        const int sum_of_bytes = sum(total);
        to.scales[index] = largest_value / 127.0f * (four_bits ? 0.5f : 1.0f);
        to.offsets[index] = -sum_of_bytes * (four_bits ? kMxfp4Offset : kInt8Offset);
    }
}

void rms_norm(const float* x, const float* weight, int k, float eps, float* out) {
    VF squares = set(0.0f);
    int i = 0;
    for (; i + W <= k; i += W) {
        const VF v = load(x + i);
        squares = madd(v, v, squares);
    }
    float total = sum(squares);
    for (; i < k; ++i) total += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(total / static_cast<float>(k) + eps);
    for (i = 0; i + W <= k; i += W) store(out + i, mul(mul(load(x + i), set(scale)), load(weight + i)));
    for (; i < k; ++i) out[i] = x[i] * scale * weight[i];
}

void rope(const float* x, const float* cosines, const float* sines, int dim, float* out) {
    const int half = dim / 2;
    for (int i = 0; i < half; ++i) {
        const float first = x[i], second = x[i + half];
        out[i] = first * cosines[i] - second * sines[i];
        out[i + half] = second * cosines[i] + first * sines[i];
    }
}

void silu_mul(const float* gate, const float* up, int count, float* out) {
    for (int i = 0; i < count; i += W) {
        float in[2][W] = {};
        const bool whole = i + W <= count;
        if (!whole) {
            std::copy(gate + i, gate + count, in[0]);
            std::copy(up + i, up + count, in[1]);
        }
        const VF g = load(whole ? gate + i : in[0]), u = load(whole ? up + i : in[1]);
        const VF minus = max(sub(set(0.0f), g), set(-87.0f));
        const VF bounded = select_less(minus, set(87.0f), minus, set(87.0f));
        const VF result = mul(div(g, add(set(1.0f), exp(bounded))), u);
        if (whole) {
            store(out + i, result);
        } else {
            store(in[0], result);
            std::copy(in[0], in[0] + (count - i), out + i);
        }
    }
}

void to_bf16(const float* x, int count, uint16_t* out) {
    int i = 0;
    for (; i + W <= count; i += W) store_bf16(out + i, load(x + i));
    for (; i < count; ++i) out[i] = narrow(x[i]);
}

float power_of_two(uint8_t e8m0) {
    const uint32_t bits = static_cast<uint32_t>(e8m0) << 23;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

void row(const MatrixView& w, int index, float* out) {
    const int panel = index / kPanel, column = index % kPanel;
    const uint8_t* data = w.data + static_cast<size_t>(panel) * w.blocks * block_bytes(w.format);
    for (int k = 0; k < w.k; ++k) {
        const int block = k / kBlock, at = k % kBlock;
        const uint8_t* from = data + static_cast<size_t>(block) * block_bytes(w.format);
        const size_t scale = (static_cast<size_t>(panel) * w.blocks + block) * kPanel + column;
        const size_t half = column / kHalf * (kBlock * kHalf / 2);
        if (w.format == Format::bf16) {
            out[k] = widen(reinterpret_cast<const uint16_t*>(from)[at / 2 * 2 * kPanel + 2 * column + at % 2]);
        } else if (w.format == Format::int8) {
            out[k] = (static_cast<int>(from[at / 4 * 4 * kPanel + 4 * column + at % 4]) - kInt8Offset) *
                     widen(reinterpret_cast<const uint16_t*>(w.scales)[scale]);
        } else if (w.format == Format::mxfp4) {
            const uint8_t byte = from[half + at / 8 * 4 * kHalf + 4 * (column % kHalf) + at % 4];
            const int code = at % 8 < 4 ? byte & 15 : byte >> 4;
            out[k] = widen(kCodeWords[code]) * power_of_two(w.scales[scale]);
        } else {
            const uint8_t* word = from + half + at / 8 * 4 * kHalf + 4 * (column % kHalf) + 2 * (at % 2);
            const int code = (word[at % 8 / 4] >> (at % 4 / 2 * 4)) & 15;
            out[k] = widen(kCodeWords[code]) * power_of_two(w.scales[scale]);
        }
    }
}

int argmax(const float* x, int count) {
    const VF infinity = set(std::numeric_limits<float>::infinity());
    VF best = sub(set(0.0f), infinity), beyond = set(0.0f);
    int i = 0;
    for (; i + W <= count; i += W) {
        const VF values = load(x + i);
        best = max(best, values);
        beyond = max(beyond, select_less(values, infinity, set(0.0f), set(1.0f)));
    }
    float top = largest(best);
    bool nan = largest(beyond) > 0.0f;
    for (; i < count; ++i) {
        top = x[i] > top ? x[i] : top;
        nan |= x[i] != x[i];
    }
    if (nan)
        for (i = 0; i < count; ++i)
            if (x[i] != x[i]) return i;
    for (i = 0; i < count; ++i)
        if (x[i] == top) return i;
    return 0;
}

// Twice over values that the first look brings into the cache: for the highest, then for the sum, in four parts so that a
// term of 1 swallows few of those that are next to nothing.
Peak peak(const float* x, int count) {
    constexpr int parts = 4;
    const VF infinity = set(std::numeric_limits<float>::infinity()), lowest = sub(set(0.0f), infinity);
    float padded[W];
    const int whole = count / W * W;
    store(padded, lowest);
    std::copy(x + whole, x + count, padded);
    const auto at = [&](int i) { return load(i < whole ? x + i : padded); };
    VF best = lowest, beyond = set(0.0f);
    for (int i = 0; i < count; i += W) {
        const VF values = at(i);
        best = max(best, values);
        beyond = max(beyond, select_less(values, infinity, set(0.0f), set(1.0f)));
    }
    if (largest(beyond) > 0.0f) return {0.0f, 0, 0.0f, true};
    const float top = largest(best);
    if (top == -std::numeric_limits<float>::infinity()) return {top, 0, 0.0f, false};
    VF mass[parts];
    for (VF& part : mass) part = set(0.0f);
    int i = 0;
    for (; i + parts * W <= whole; i += parts * W)
        for (int part = 0; part < parts; ++part)
            mass[part] = add(mass[part], exp(sub(load(x + i + part * W), set(top))));
    for (; i < count; i += W) mass[0] = add(mass[0], exp(sub(at(i), set(top))));
    const float total = sum(add(add(mass[0], mass[1]), add(mass[2], mass[3])));
    return {top, static_cast<int>(std::find(x, x + count, top) - x), total, false};
}

// Plain loops over the block that compilers turn into vectors; sums fold halves, so every instruction set gets the same.
int quantize_block(const float* x, uint8_t* codes) {
    constexpr int lowest = -127, highest = 125, bias = 127;
    float magnitudes[kBlock], folded[kBlock];
    for (int i = 0; i < kBlock; ++i) folded[i] = magnitudes[i] = std::fabs(x[i]);
    float broken = 0.0f;
    for (int i = 0; i < kBlock; ++i) broken += x[i] * 0.0f;
    if (broken != 0.0f) return -1;
    for (int half = kBlock / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) folded[i] = folded[i] > folded[i + half] ? folded[i] : folded[i + half];
    const float top = folded[0];
    if (top == 0.0f) {
        for (int i = 0; i < kBlock; ++i) codes[i] = std::signbit(x[i]) ? 8 : 0;
        return lowest + bias;
    }
    const int ocp = std::clamp(std::ilogb(top) - 2, lowest, highest);
    float best[kBlock];
    const auto round_to = [&](int exponent, float* values) {
        const float inverse = std::ldexp(1.0f, -exponent);
        constexpr float big = 12582912.0f;  // adding and subtracting it rounds to an integer, ties to even
        for (int i = 0; i < kBlock; ++i) {
            const float y = magnitudes[i] * inverse;
            const float small = ((y * 2.0f + big) - big) * 0.5f;
            const float middle = (y + big) - big;
            const float large = ((y * 0.5f + big) - big) * 2.0f;
            const float value = y < 2.0f ? small : y < 4.0f ? middle : large;
            values[i] = value < 6.0f ? value : 6.0f;
        }
    };
    const auto error_of = [&](int exponent, const float* values) {
        const double scale = std::ldexp(1.0, exponent);
        double errors[kBlock];
        for (int i = 0; i < kBlock; ++i) {
            const double error = static_cast<double>(magnitudes[i]) - static_cast<double>(values[i]) * scale;
            errors[i] = error * error;
        }
        for (int half = kBlock / 2; half; half /= 2)
            for (int i = 0; i < half; ++i) errors[i] += errors[i + half];
        return errors[0];
    };
    round_to(ocp, best);
    // Only for such largest elements can a neighbour win (see quantization/mxfp4.py).
    const float largest_element = top * std::ldexp(1.0f, -ocp);
    const int other = largest_element > 7.0f ? ocp + 1 : largest_element < 4.46875f ? ocp - 1 : ocp;
    int chosen = ocp;
    if (other != ocp && other >= lowest && other <= highest) {
        float values[kBlock];
        round_to(other, values);
        if (error_of(other, values) < error_of(ocp, best)) {
            chosen = other;
            std::memcpy(best, values, sizeof best);
        }
    }
    for (int i = 0; i < kBlock; ++i) {
        const float value = best[i];
        const int code = static_cast<int>(value < 2.0f ? value * 2.0f : value < 4.0f ? value + 2.0f : value * 0.5f + 4.0f);
        codes[i] = static_cast<uint8_t>(code | (std::signbit(x[i]) ? 8 : 0));
    }
    return chosen + bias;
}

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) for 16 counters at once.
void noise_words(uint64_t first, uint64_t seed, uint64_t position, uint32_t stream, uint32_t* words) {
    constexpr int count = 16;
    uint32_t counter[4][count];
    for (int i = 0; i < count; ++i) {
        counter[0][i] = static_cast<uint32_t>(first / 4 + i);
        counter[1][i] = static_cast<uint32_t>(position);
        counter[2][i] = static_cast<uint32_t>(position >> 32);
        counter[3][i] = stream;
    }
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        for (int i = 0; i < count; ++i) {
            const uint64_t even = uint64_t{0xD2511F53} * counter[0][i], odd = uint64_t{0xCD9E8D57} * counter[2][i];
            counter[0][i] = static_cast<uint32_t>(odd >> 32) ^ counter[1][i] ^ key[0];
            counter[2][i] = static_cast<uint32_t>(even >> 32) ^ counter[3][i] ^ key[1];
            counter[1][i] = static_cast<uint32_t>(odd);
            counter[3][i] = static_cast<uint32_t>(even);
        }
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    for (int i = 0; i < count; ++i)
        for (int lane = 0; lane < 4; ++lane) words[4 * i + lane] = counter[lane][i];
}

// -log(-log u) >= best - score needs 1 - u <= 1 - exp(-p) <= p with p = exp(score - best).
uint64_t contenders(const float* scores, const uint32_t* words, float best) {
    uint64_t found = 0;
    for (int i = 0; i < 64; i += W) {
        float likely[W];
        const VF bounded = sub(load(scores + i), set(best));
        store(likely, exp(select_less(bounded, set(1.0f), bounded, set(1.0f))));
        for (int lane = 0; lane < W; ++lane) {
            const float rest = static_cast<float>(~words[i + lane]) * 0x1p-32f;
            found |= static_cast<uint64_t>(rest <= likely[lane] * 1.001f + 0x1p-31f) << (i + lane);
        }
    }
    return found;
}

#if defined(__AVX512F__)
constexpr int kMixVectors = 4;
constexpr int score_vectors(int rows) { return rows <= 3 ? 4 : 2; }
#else
constexpr int kMixVectors = 1;
constexpr int score_vectors(int) { return 1; }
#endif

// Scores of R rows at the C * W positions from `position` of a step; keys lie in blocks of kPositions.
template <int R, int C>
void scores(const KVView& kv, uint16_t* const* blocks, const QueryTile& tile, int position, VF scale, float* out) {
    const uint16_t* keys[C];
    for (int c = 0; c < C; ++c) {
        const int at = position + c * W;
        keys[c] = blocks[at / kPositions] + 2 * (at % kPositions);
    }
    VF acc[R][C];
    for (auto& each : acc)
        for (VF& part : each) part = set(0.0f);
    for (int d = 0; d < kv.head_dim; d += 2) {
        Pairs part[C];
        for (int c = 0; c < C; ++c) part[c] = load_pairs(keys[c] + d * kPositions);
        for (int r = 0; r < R; ++r) {
            const Pairs query = set_pairs(tile.queries[r] + d);
            for (int c = 0; c < C; ++c) acc[r][c] = dot(acc[r][c], part[c], query);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(out + r * kStep + position + c * W, mul(acc[r][c], scale));
}

// C * W dimensions of R rows' mixtures over the step's blocks of values.
template <int R, int C>
void mix(const KVView& kv, uint16_t* const* blocks, int count, const uint16_t* weights, int dimension, float* out) {
    VF acc[R][C];
    for (auto& each : acc)
        for (VF& part : each) part = set(0.0f);
    for (int block = 0; block < count; ++block) {
        const uint16_t* values = blocks[block] + kPositions * kv.padded_dim + 2 * dimension;
        for (int pair = 0; pair < kPositions / 2; ++pair) {
            Pairs part[C];
            for (int c = 0; c < C; ++c) part[c] = load_pairs(values + pair * 2 * kv.padded_dim + c * 2 * W);
            for (int r = 0; r < R; ++r) {
                const Pairs weight = set_pairs(weights + r * kStep + block * kPositions + 2 * pair);
                for (int c = 0; c < C; ++c) acc[r][c] = dot(acc[r][c], part[c], weight);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(out + r * kv.padded_dim + dimension + c * W, acc[r][c]);
}

// Softmax goes over fixed steps of kStep absolute positions: each has its own maximum, weights and mixture, and the
// steps are merged in order. A position that a row may not see has weight 0, and a step without any that it may see
// changes nothing, so a row's result depends neither on the other rows of its tile nor on who computes which step.
template <int R>
void step(const KVView& kv, const int32_t* pages, const QueryTile& tile, int first, float scale, float* partial) {
    constexpr float lowest = -std::numeric_limits<float>::infinity();
    float score[R * kStep];
    uint16_t weights[R * kStep];
    uint16_t* blocks[kStep / kPositions];
    int end = tile.end[0];
    for (int r = 1; r < R; ++r) end = std::max(end, tile.end[r]);
    const int count = (std::min(kStep, end - first) + kPositions - 1) / kPositions, length = count * kPositions;
    for (int block = 0; block < count; ++block) {
        blocks[block] = kv.block(pages, first + block * kPositions);
        // Hardware does not look beyond a page, and values are wanted soon.
        for (int i = 0; i < 2 * kPositions * kv.padded_dim; i += 32) prefetch(blocks[block] + i);
    }
    constexpr int C = score_vectors(R);
    int position = 0;
    for (; position + C * W <= length; position += C * W)
        scores<R, C>(kv, blocks, tile, position, set(scale), score);
    for (; position < length; position += W) scores<R, 1>(kv, blocks, tile, position, set(scale), score);
    float* highest = partial + static_cast<size_t>(kQueries) * kv.padded_dim;
    float* mass = highest + kQueries;
    for (int r = 0; r < R; ++r) {
        float* own = score + r * kStep;
        const int from = std::clamp(tile.begin[r] - first, 0, length), to = std::clamp(tile.end[r] - first, 0, length);
        std::fill(own, own + from, lowest);
        std::fill(own + std::max(from, to), own + length, lowest);
        VF top = set(lowest);
        for (int i = 0; i < length; i += W) top = max(top, load(own + i));
        highest[r] = from < to ? largest(top) : lowest;
        const VF shift = set(from < to ? highest[r] : 0.0f);
        VF all = set(0.0f);
        for (int i = 0; i < length; i += W) {
            const VF weight = exp(sub(load(own + i), shift));
            all = add(all, weight);
            store_bf16(weights + r * kStep + i, weight);
        }
        mass[r] = sum(all);
    }
    int dimension = 0;
    for (; dimension + kMixVectors * W <= kv.padded_dim; dimension += kMixVectors * W)
        mix<R, kMixVectors>(kv, blocks, count, weights, dimension, partial);
    for (; dimension < kv.padded_dim; dimension += W) mix<R, 1>(kv, blocks, count, weights, dimension, partial);
}

void attention_step(const KVView& kv, const int32_t* pages, const QueryTile& tile, int first, float scale,
                    float* partial) {
    using Step = void (*)(const KVView&, const int32_t*, const QueryTile&, int, float, float*);
    constexpr Step kByRows[kQueries] = {step<1>, step<2>, step<3>, step<4>, step<5>, step<6>};
    kByRows[tile.rows - 1](kv, pages, tile, first, scale, partial);
}

void attention_merge(const QueryTile& tile, const float* partials, int steps, size_t stride, int head_dim,
                     int padded_dim) {
    const float* highest = partials + static_cast<size_t>(kQueries) * padded_dim;
    const float* mass = highest + kQueries;
    for (int r = 0; r < tile.rows; ++r) {
        float top = -std::numeric_limits<float>::infinity(), total = 0.0f;
        for (int s = 0; s < steps; ++s) top = std::max(top, highest[s * stride + r]);
        // exp(-inf) is 0: a step in which the row sees nothing.
        for (int s = 0; s < steps; ++s) {
            float factor[W];
            store(factor, exp(set(highest[s * stride + r] - top)));
            total += mass[s * stride + r] * factor[0];
        }
        for (int d = 0; d < head_dim; d += W) {
            VF acc = set(0.0f);
            for (int s = 0; s < steps; ++s)
                acc = madd(load(partials + s * stride + r * padded_dim + d), exp(set(highest[s * stride + r] - top)), acc);
            const VF result = div(acc, set(total));
            if (d + W <= head_dim) {
                store(tile.out[r] + d, result);
            } else {
                float lanes[W];
                store(lanes, result);
                std::copy(lanes, lanes + (head_dim - d), tile.out[r] + d);
            }
        }
    }
}

}  // namespace

}  // namespace FOREDRAFT_ISA

namespace foredraft {
extern const Kernels FOREDRAFT_TABLE = {
    FOREDRAFT_ISA_NAME,      FOREDRAFT_ISA::linear, FOREDRAFT_ISA::fetch,  FOREDRAFT_ISA::activate, FOREDRAFT_ISA::rms_norm,
    FOREDRAFT_ISA::rope,     FOREDRAFT_ISA::silu_mul, FOREDRAFT_ISA::to_bf16,  FOREDRAFT_ISA::row,
    FOREDRAFT_ISA::argmax,   FOREDRAFT_ISA::peak, FOREDRAFT_ISA::quantize_block, FOREDRAFT_ISA::noise_words, FOREDRAFT_ISA::contenders, FOREDRAFT_ISA::attention_step,
    FOREDRAFT_ISA::attention_merge,
};
}  // namespace foredraft
