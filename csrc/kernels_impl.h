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
using foredraft::QueryTile;

constexpr int kHalf = 16;  // columns of half a panel, in which MXFP4 is stored

// 2 x E2M1 plus 12, and E2M1 in bfloat16.
alignas(16) constexpr uint8_t kCodeBytes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
alignas(32) constexpr uint16_t kCodeWords[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
constexpr int kMxfp4Offset = 12;
constexpr int kInt8Offset = 128;

#if defined(__AVX512F__)
constexpr int kMaxRowsBf16 = 7, kMaxRowsBytes = 8, kColumnVectors = 2;
#elif defined(__AVX2__)
constexpr int kMaxRowsBf16 = 4, kMaxRowsBytes = 4, kColumnVectors = 1;
#else
constexpr int kMaxRowsBf16 = 4, kMaxRowsBytes = 4, kColumnVectors = 1;
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

// What comes next in memory is fetched while a panel is multiplied: `lines` cache lines for each block.
struct Ahead {
    const uint8_t* next;
    int lines;
    void fetch(int block) const {
        for (int i = 0; i < lines; ++i) prefetch(next + static_cast<size_t>(block * lines + i) * 64);
    }
};

template <int R>
void tile_bf16(const MatrixView& w, int panel, const Activations& x, int row, const Output& output, const Ahead& ahead) {
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
            if (column == 0) ahead.fetch(block);
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
void tile_mxfp4_a16(const MatrixView& w, int panel, const Activations& x, int row, const Output& output,
                    const Ahead& ahead) {
    const int stride = w.blocks * kBlock;
    const uint8_t* codes = w.data + static_cast<size_t>(panel) * w.blocks * block_bytes(Format::mxfp4);
    const uint8_t* scales = w.scales + static_cast<size_t>(panel) * w.blocks * kPanel;
    const uint16_t* rows = x.values + static_cast<size_t>(row) * stride;
    const WordTable table(kCodeWords);
    for (int column = 0; column < kPanel; column += W) {
        VF total[R];
        for (VF& each : total) each = set(0.0f);
        for (int block = 0; block < w.blocks; ++block) {
            VF acc[R];
            for (VF& each : acc) each = set(0.0f);
            const uint8_t* at = codes + static_cast<size_t>(block) * kBlock * kPanel / 2 +
                                column / kHalf * (kBlock * kHalf / 2) + column % kHalf * 4;
            if (column == 0) ahead.fetch(block);
            for (int group = 0; group < 4; ++group) {
                const uint8_t* words = at + group * 4 * kHalf;
                const Pairs part[4] = {table.at<0>(words), table.at<1>(words), table.at<2>(words), table.at<3>(words)};
                for (int pair = 0; pair < 4; ++pair)
                    for (int r = 0; r < R; ++r)
                        acc[r] = dot(acc[r], part[pair],
                                     set_pairs(rows + static_cast<size_t>(r) * stride + block * kBlock + 8 * group +
                                               2 * pair));
            }
            const VF scale = load_e8m0(scales + block * kPanel + column);
            for (int r = 0; r < R; ++r) total[r] = madd(acc[r], scale, total[r]);
        }
        for (int r = 0; r < R; ++r) output.put(row + r, column, total[r]);
    }
}

template <bool four_bits, int R>
void tile_bytes(const MatrixView& w, int panel, const Activations& x, int row, const Output& output, const Ahead& ahead) {
    constexpr Format format = four_bits ? Format::mxfp4 : Format::int8;
    const int stride = w.blocks * kBlock;
    const uint8_t* weights = w.data + static_cast<size_t>(panel) * w.blocks * block_bytes(format);
    const uint8_t* scales = w.scales + static_cast<size_t>(panel) * w.blocks * scale_bytes(format);
    const int8_t* rows = x.bytes + static_cast<size_t>(row) * stride;
    const float* row_scales = x.scales + static_cast<size_t>(row) * w.blocks;
    const int32_t* offsets = x.offsets + static_cast<size_t>(row) * w.blocks;
    const ByteTable table(kCodeBytes);
    for (int column = 0; column < kPanel; column += W) {
        VF total[R];
        for (VF& each : total) each = set(0.0f);
        for (int block = 0; block < w.blocks; ++block) {
            if (column == 0) ahead.fetch(block);
            VI part[8];
            VF scale;
            if constexpr (four_bits) {
                const uint8_t* at = weights + static_cast<size_t>(block) * block_bytes(format) +
                                    column / kHalf * (kBlock * kHalf / 2) + column % kHalf * 4;
                for (int group = 0; group < 4; ++group) {
                    const VI codes = load_bytes(at + group * 4 * kHalf);
                    part[2 * group] = table.low(codes);
                    part[2 * group + 1] = table.high(codes);
                }
                scale = load_e8m0(scales + block * kPanel + column);
            } else {
                const uint8_t* at = weights + static_cast<size_t>(block) * block_bytes(format) + 4 * column;
                for (int quad = 0; quad < 8; ++quad) part[quad] = load_bytes(at + quad * 4 * kPanel);
                scale = load_bf16(reinterpret_cast<const uint16_t*>(scales) + block * kPanel + column);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                VI acc = seti(offsets[static_cast<size_t>(r) * w.blocks + block]);
                for (int quad = 0; quad < 8; ++quad)
                    acc = dot<four_bits>(
                        acc, part[quad], set_quad(rows + static_cast<size_t>(r) * stride + block * kBlock + 4 * quad));
                const VF both = mul(scale, set(row_scales[static_cast<size_t>(r) * w.blocks + block]));
                total[r] = madd(to_float(acc), both, total[r]);
            }
        }
        for (int r = 0; r < R; ++r) output.put(row + r, column, total[r]);
    }
}

template <int R>
void tile_mxfp4(const MatrixView& w, int panel, const Activations& x, int row, const Output& output, const Ahead& ahead) {
    tile_bytes<true, R>(w, panel, x, row, output, ahead);
}
template <int R>
void tile_int8(const MatrixView& w, int panel, const Activations& x, int row, const Output& output, const Ahead& ahead) {
    tile_bytes<false, R>(w, panel, x, row, output, ahead);
}

using Tile = void (*)(const MatrixView&, int, const Activations&, int, const Output&, const Ahead&);
constexpr Tile kTilesBf16[] = {tile_bf16<1>, tile_bf16<2>, tile_bf16<3>, tile_bf16<4>,
                               tile_bf16<5>, tile_bf16<6>, tile_bf16<7>};
constexpr Tile kTilesA16[] = {tile_mxfp4_a16<1>, tile_mxfp4_a16<2>, tile_mxfp4_a16<3>, tile_mxfp4_a16<4>,
                              tile_mxfp4_a16<5>, tile_mxfp4_a16<6>, tile_mxfp4_a16<7>, tile_mxfp4_a16<8>};
constexpr Tile kTilesMxfp4[] = {tile_mxfp4<1>, tile_mxfp4<2>, tile_mxfp4<3>, tile_mxfp4<4>,
                                tile_mxfp4<5>, tile_mxfp4<6>, tile_mxfp4<7>, tile_mxfp4<8>};
constexpr Tile kTilesInt8[] = {tile_int8<1>, tile_int8<2>, tile_int8<3>, tile_int8<4>,
                               tile_int8<5>, tile_int8<6>, tile_int8<7>, tile_int8<8>};

void linear(const MatrixView& w, const Activations& x, int rows, int first, int last, const float* bias,
            bool accumulate, float* out, size_t out_stride) {
    const Tile* tiles = w.format == Format::bf16    ? kTilesBf16
                        : w.format == Format::int8  ? kTilesInt8
                        : w.format == Format::mxfp4 ? kTilesMxfp4
                                                    : kTilesA16;
    const int most = w.format == Format::bf16 ? kMaxRowsBf16 : kMaxRowsBytes;
    const size_t panel_bytes = w.blocks * block_bytes(w.format);
    for (int begin = 0; begin < rows; begin += kRowBlock) {
        const int end = std::min(rows, begin + kRowBlock);
        const int parts = (end - begin + most - 1) / most;
        for (int panel = first; panel < last; ++panel) {
            const Output output{out + static_cast<size_t>(panel) * kPanel, out_stride,
                                bias ? bias + static_cast<size_t>(panel) * kPanel : nullptr, accumulate,
                                std::min(kPanel, w.n - panel * kPanel)};
            // Each pass over this panel fetches its share of the next one.
            const int lines = panel + 1 < last ? static_cast<int>(block_bytes(w.format) / 64) : 0;
            for (int part = 0; part < parts; ++part) {
                const int from = begin + (end - begin) * part / parts;
                const int to = begin + (end - begin) * (part + 1) / parts;
                const int from_line = lines * part / parts, to_line = lines * (part + 1) / parts;
                const Ahead ahead{w.data + (panel + 1) * panel_bytes + static_cast<size_t>(from_line) * w.blocks * 64,
                                  to_line - from_line};
                tiles[to - from - 1](w, panel, x, from, output, ahead);
            }
        }
    }
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
        VF top = set(0.0f);
        for (int i = 0; i < kBlock; i += W) top = max(top, abs(load(values + i)));
        const float largest_value = largest(top);
        const float inverse = largest_value > 1e-30f ? 127.0f / largest_value : 0.0f;
        int8_t* bytes = to.bytes + row * stride + at;
        VI total = seti(0);
        for (int i = 0; i < kBlock; i += W) {
            const VI rounded = round(mul(load(values + i), set(inverse)));
            total = addi(total, rounded);
            store_int8(bytes + i, rounded);
        }
        int32_t lanes[W], sum_of_bytes = 0;
        std::memcpy(lanes, &total, sizeof lanes);
        for (int32_t lane : lanes) sum_of_bytes += lane;
        const bool four_bits = format == Format::mxfp4;
        const size_t index = static_cast<size_t>(row) * to.blocks + at / kBlock;
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
    VF best = set(-std::numeric_limits<float>::infinity());
    int i = 0;
    for (; i + W <= count; i += W) best = max(best, load(x + i));
    float top = largest(best);
    for (; i < count; ++i) top = x[i] > top ? x[i] : top;
    for (i = 0; i < count; ++i)
        if (x[i] == top || x[i] != x[i]) return i;
    return 0;
}

// Plain loops over the block that compilers turn into vectors; sums fold halves, so every instruction set gets the same.
int quantize_block(const float* x, uint8_t* codes) {
    constexpr int lowest = -127, highest = 125, bias = 127;
    const auto scale_of = [](int exponent) { return std::ldexp(1.0f, exponent); };
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
    double least = 0.0;
    int chosen = lowest - 1;
    float best[kBlock];
    for (const int exponent : {ocp, ocp + 1, ocp - 1}) {
        if (exponent < lowest || exponent > highest) continue;
        const float inverse = scale_of(-exponent), scale = scale_of(exponent);
        constexpr float big = 12582912.0f;  // adding and subtracting it rounds to an integer, ties to even
        float values[kBlock];
        double errors[kBlock];
        for (int i = 0; i < kBlock; ++i) {
            const float y = magnitudes[i] * inverse;
            const float small = ((y * 2.0f + big) - big) * 0.5f;
            const float middle = (y + big) - big;
            const float large = ((y * 0.5f + big) - big) * 2.0f;
            const float value = y < 2.0f ? small : y < 4.0f ? middle : large;
            values[i] = value < 6.0f ? value : 6.0f;
        }
        for (int i = 0; i < kBlock; ++i) {
            const double error = static_cast<double>(magnitudes[i]) - static_cast<double>(values[i]) * scale;
            errors[i] = error * error;
        }
        for (int half = kBlock / 2; half; half /= 2)
            for (int i = 0; i < half; ++i) errors[i] += errors[i + half];
        if (chosen < lowest || errors[0] < least) {
            least = errors[0];
            chosen = exponent;
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

template <int R>
void scores(const uint16_t* keys, const QueryTile& tile, int dim, VF scale, float* out) {
    for (int column = 0; column < kPositions; column += W) {
        VF acc[R];
        for (VF& each : acc) each = set(0.0f);
        for (int d = 0; d < dim; d += 2) {
            const Pairs part = load_pairs(keys + d * kPositions + 2 * column);
            for (int r = 0; r < R; ++r) acc[r] = dot(acc[r], part, set_pairs(tile.queries[r] + d));
        }
        for (int r = 0; r < R; ++r) store(out + r * kStep + column, mul(acc[r], scale));
    }
}

// acc[r][C * W dimensions] over the step's blocks of values.
template <int R, int C>
void mix(const KVView& kv, const int32_t* pages, int first, int blocks, const uint16_t* weights, int dimension,
         float* out) {
    VF acc[R][C];
    for (auto& each : acc)
        for (VF& part : each) part = set(0.0f);
    for (int block = 0; block < blocks; ++block) {
        const uint16_t* values =
            kv.block(pages, first + block * kPositions) + kPositions * kv.padded_dim + 2 * dimension;
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

// Softmax over fixed steps of kStep absolute positions: each step's maximum, weights and mixture are its own, and the
// steps are merged in order. A position that a row may not see has weight 0 there, and a step without any that it may
// see changes nothing, so a row's result does not depend on the other rows of its tile.
template <int R>
void attend(const KVView& kv, const int32_t* pages, const QueryTile& tile, float scale, float* scratch) {
    float* score = scratch;
    uint16_t* weights = reinterpret_cast<uint16_t*>(score + kQueries * kStep);
    float* mixed = score + kQueries * (kStep + kStep / 2);
    float* total = mixed + kQueries * kv.padded_dim;
    float top[R], mass[R];
    int begin = tile.begin[0], end = tile.end[0];
    for (int r = 0; r < R; ++r) {
        top[r] = -std::numeric_limits<float>::infinity();
        mass[r] = 0.0f;
        begin = std::min(begin, tile.begin[r]);
        end = std::max(end, tile.end[r]);
    }
    std::fill(total, total + R * kv.padded_dim, 0.0f);
    for (int first = begin / kStep * kStep; first < end; first += kStep) {
        const int blocks = (std::min(kStep, end - first) + kPositions - 1) / kPositions;
        for (int block = 0; block < blocks; ++block)
            scores<R>(kv.block(pages, first + block * kPositions), tile, kv.head_dim, set(scale),
                      score + block * kPositions);
        float step_top[R], step_mass[R];
        for (int r = 0; r < R; ++r) {
            float* own = score + r * kStep;
            const int from = std::clamp(tile.begin[r] - first, 0, blocks * kPositions);
            const int to = std::clamp(tile.end[r] - first, 0, blocks * kPositions);
            std::fill(own, own + from, -std::numeric_limits<float>::infinity());
            std::fill(own + to, own + blocks * kPositions, -std::numeric_limits<float>::infinity());
            VF highest = set(-std::numeric_limits<float>::infinity());
            for (int i = 0; i < blocks * kPositions; i += W) highest = max(highest, load(own + i));
            step_top[r] = from < to ? largest(highest) : 0.0f;
            VF all = set(0.0f);
            for (int i = 0; i < blocks * kPositions; i += W) {
                const VF weight = exp(sub(load(own + i), set(step_top[r])));
                all = add(all, weight);
                store_bf16(weights + r * kStep + i, weight);
            }
            step_mass[r] = sum(all);
        }
        int dimension = 0;
        for (; dimension + 2 * W <= kv.padded_dim; dimension += 2 * W)
            mix<R, 2>(kv, pages, first, blocks, weights, dimension, mixed);
        for (; dimension < kv.padded_dim; dimension += W)
            mix<R, 1>(kv, pages, first, blocks, weights, dimension, mixed);
        for (int r = 0; r < R; ++r) {
            if (step_mass[r] == 0.0f) continue;
            const float highest = std::max(top[r], step_top[r]);
            const VF difference = exp(set(top[r] - highest)), own_difference = exp(set(step_top[r] - highest));
            float lanes[2][W];
            store(lanes[0], difference);
            store(lanes[1], own_difference);
            mass[r] = mass[r] * lanes[0][0] + step_mass[r] * lanes[1][0];
            float* sums = total + r * kv.padded_dim;
            for (int d = 0; d < kv.padded_dim; d += W)
                store(sums + d, madd(load(mixed + r * kv.padded_dim + d), own_difference, mul(load(sums + d), difference)));
            top[r] = highest;
        }
    }
    for (int r = 0; r < R; ++r)
        for (int d = 0; d < kv.head_dim; ++d) tile.out[r][d] = total[r * kv.padded_dim + d] / mass[r];
}

void attention(const KVView& kv, const int32_t* pages, const QueryTile& tile, float scale, float* scratch) {
    using Attend = void (*)(const KVView&, const int32_t*, const QueryTile&, float, float*);
    constexpr Attend kByRows[] = {attend<1>, attend<2>, attend<3>, attend<4>, attend<5>, attend<6>, attend<7>, attend<8>};
    kByRows[tile.rows - 1](kv, pages, tile, scale, scratch);
}

}  // namespace

}  // namespace FOREDRAFT_ISA

namespace foredraft {
extern const Kernels FOREDRAFT_TABLE = {
    FOREDRAFT_ISA_NAME,      FOREDRAFT_ISA::linear,   FOREDRAFT_ISA::activate, FOREDRAFT_ISA::rms_norm,
    FOREDRAFT_ISA::rope,     FOREDRAFT_ISA::silu_mul, FOREDRAFT_ISA::to_bf16,  FOREDRAFT_ISA::row,
    FOREDRAFT_ISA::argmax,   FOREDRAFT_ISA::quantize_block, FOREDRAFT_ISA::attention,
};
}  // namespace foredraft
