#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace foredraft {
namespace {

// Up to so many rows every thread prepares all activations for itself: that is cheaper than to meet.
constexpr int kFewRows = 16;
// With fewer query tiles than this for each thread, the steps of their attention are shared out instead.
constexpr int kTilesEach = 16;
// A stack up to this size (a drafter) can stay in the last cache while a larger one streams by.
constexpr size_t kKeptBytes = size_t{16} << 20;
// Logits whose sum of exponentials is one step: they stay in the first cache, and threads share the steps.
constexpr int kBestStep = 4096;

int padded(int count, int unit) { return (count + unit - 1) / unit * unit; }

// Memory for activations of `rows` rows with `k` elements, in either form. Grows, never shrinks.
class ActivationBuffer {
   public:
    const Activations& fit(int rows, int k) {
        const int blocks = padded(k, kBlock) / kBlock;
        const size_t elements = static_cast<size_t>(rows) * blocks * kBlock;
        if (values_.size() < elements) {
            values_.resize(elements);
            bytes_.resize(elements);
            scales_.resize(elements / kBlock);
            offsets_.resize(elements / kBlock);
        }
        view_ = {values_.data(), bytes_.data(), scales_.data(), offsets_.data(), blocks};
        return view_;
    }
    const Activations& view() const { return view_; }

   private:
    std::vector<uint16_t> values_;
    std::vector<int8_t> bytes_;
    std::vector<float> scales_;
    std::vector<int32_t> offsets_;
    Activations view_;
};

const float* optional(const std::vector<float>& bias) { return bias.empty() ? nullptr : bias.data(); }

// What this thread will read first of a matrix, fetched while it would wait for the others.
void fetch(const Team& team, const Matrix& weight) {
    int first, last;
    team.share(weight.view().panels, 1, first, last);
    if (first < last) kernels().fetch(weight.view(), first);
}

void require_shape(const char* name, const Matrix& matrix, int n, int k) {
    const MatrixView& view = matrix.view();
    if (view.n != n || view.k != k)
        throw std::invalid_argument(std::string(name) + " is " + std::to_string(view.n) + " x " + std::to_string(view.k) +
                                    ", expected " + std::to_string(n) + " x " + std::to_string(k));
}

void multiply(const Team& team, const Matrix& weight, const Activations& x, int rows, const float* bias,
              bool accumulate, float* out, size_t stride) {
    int first, last;
    team.share(weight.view().panels, 1, first, last);
    kernels().linear(weight.view(), x, rows, first, last, bias, accumulate, out, stride);
}

}  // namespace

PagePool::PagePool(int layers, int kv_heads, int head_dim)
    : layers_(layers), kv_heads_(kv_heads), head_dim_(head_dim), padded_dim_(padded(head_dim, 16)) {
    if (head_dim % 2) throw std::invalid_argument("the head size must be even");
    head_bytes_ = static_cast<size_t>(4) * kPagePositions * padded_dim_;
    page_bytes_ = head_bytes_ * layers * kv_heads;
}

void PagePool::reserve(int pages) {
    while (this->pages() < pages) {
        chunks_.emplace_back(page_bytes_ * kPagesPerChunk);
        addresses_.push_back(chunks_.back().data());
    }
}

KVView PagePool::view(int layer, int kv_head) const {
    return {addresses_.data(), page_bytes_, (static_cast<size_t>(layer) * kv_heads_ + kv_head) * head_bytes_, head_dim_,
            padded_dim_};
}

struct Decoder::Scratch {
    struct Own {
        ActivationBuffer activations;
        std::vector<float> row, partials;
    };
    ActivationBuffer shared, gated;
    std::vector<float> qkv, mixed, gate, up;
    std::vector<uint16_t> queries;
    std::vector<Own> own;
    bool split = false;
    std::vector<float> partials;
};

Decoder::Decoder(DecoderShape shape, std::vector<LayerWeights> layers, std::vector<float> frequencies, float factor,
                 std::vector<int> kv_layers)
    : shape_(shape),
      layers_(std::move(layers)),
      frequencies_(std::move(frequencies)),
      factor_(factor),
      kv_layers_(std::move(kv_layers)),
      scratch_(new Scratch, [](Scratch* scratch) { delete scratch; }) {
    if (static_cast<int>(frequencies_.size()) * 2 != shape_.head_dim)
        throw std::invalid_argument("there must be one rotary frequency for each pair of a head's dimensions");
    if (layers_.empty()) throw std::invalid_argument("a decoder needs a layer");
    if (shape_.kv_heads < 1 || shape_.heads % shape_.kv_heads)
        throw std::invalid_argument("the heads must be a multiple of the key/value heads");
    if (!kv_layers_.empty() && kv_layers_.size() != layers_.size())
        throw std::invalid_argument("kv_layers must name a layer for each layer");
    const int queries = shape_.heads * shape_.head_dim;
    const int rows = queries + (kv_layers_.empty() ? 2 * shape_.kv_heads * shape_.head_dim : 0);
    for (const LayerWeights& layer : layers_) {
        const int columns = &layer == &layers_.front() ? attention_width() : shape_.hidden;
        require_shape("qkv", *layer.qkv, rows, columns);
        require_shape("out", *layer.out, shape_.hidden, queries);
        require_shape("gate", *layer.gate, shape_.inner, shape_.hidden);
        require_shape("up", *layer.up, shape_.inner, shape_.hidden);
        require_shape("down", *layer.down, shape_.hidden, shape_.inner);
    }
    if (weight_bytes() > kKeptBytes)
        for (LayerWeights& layer : layers_)
            for (const auto& matrix : {layer.qkv, layer.out, layer.gate, layer.up, layer.down}) matrix->set_streamed();
}

size_t Decoder::weight_bytes() const {
    size_t total = 0;
    for (const LayerWeights& layer : layers_)
        for (const auto& matrix : {layer.qkv, layer.out, layer.gate, layer.up, layer.down}) total += matrix->bytes();
    return total;
}

void Decoder::check(const PagePool& pool) const {
    if (pool.kv_heads() != shape_.kv_heads || pool.head_dim() != shape_.head_dim)
        throw std::invalid_argument("the cache has " + std::to_string(pool.kv_heads()) + " key/value heads of " +
                                    std::to_string(pool.head_dim()) + ", the layers " + std::to_string(shape_.kv_heads) +
                                    " of " + std::to_string(shape_.head_dim));
    for (int index = 0; index < layers(); ++index) {
        const int layer = kv_layers_.empty() ? index : kv_layers_[index];
        if (layer < 0 || layer >= pool.layers())
            throw std::invalid_argument("the cache has layers 0 to " + std::to_string(pool.layers() - 1) + ", not " +
                                        std::to_string(layer));
    }
}

void Decoder::prepare(const Rows& rows, int threads) {
    Scratch& s = *scratch_;
    const int dim = padded(shape_.head_dim, 16);
    const auto grow = [&](auto& buffer, size_t width) {
        if (buffer.size() < width * rows.count) buffer.resize(width * rows.count);
    };
    grow(s.qkv, static_cast<size_t>(shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim);
    grow(s.mixed, static_cast<size_t>(shape_.heads) * shape_.head_dim);
    grow(s.gate, shape_.inner);
    grow(s.up, shape_.inner);
    grow(s.queries, static_cast<size_t>(shape_.heads) * dim);
    s.shared.fit(rows.count, std::max({shape_.hidden, shape_.heads * shape_.head_dim, attention_width()}));
    s.gated.fit(rows.count, shape_.inner);
    s.own.resize(threads);
    for (Scratch::Own& own : s.own) own.row.resize(std::max(shape_.hidden, 4 * shape_.head_dim));
    int end = 0;
    size_t tiles = 0, partials = 0;
    for (const Span& span : rows.spans) {
        const int last = span.start + span.count;
        const size_t own = (span.count * (shape_.heads / shape_.kv_heads) + kQueries - 1) / kQueries * shape_.kv_heads;
        end = std::max(end, last);
        tiles += own;
        partials += own * ((last + kStep - 1) / kStep);
    }
    s.split = tiles < static_cast<size_t>(kTilesEach * threads) && partials > tiles;
    if (s.split && s.partials.size() < partials * partial_size(dim)) s.partials.resize(partials * partial_size(dim));
    const size_t half = frequencies_.size();
    if (cosines_.size() < half * end) {
        const size_t had = half ? cosines_.size() / half : 0;
        const size_t positions = std::max<size_t>(end, std::max<size_t>(512, 2 * had));
        cosines_.resize(half * positions);
        sines_.resize(half * positions);
        for (size_t position = had; position < positions; ++position)
            for (size_t i = 0; i < half; ++i) {
                const float angle = static_cast<float>(position) * frequencies_[i];
                cosines_[position * half + i] = static_cast<float>(std::cos(static_cast<double>(angle))) * factor_;
                sines_[position * half + i] = static_cast<float>(std::sin(static_cast<double>(angle))) * factor_;
            }
    }
}

// Query `query` of a row of qkv, normed and rotated; `room` holds two heads.
void Decoder::put_query(const LayerWeights& layer, const float* row, int position, int at, int query, float* room) {
    const Kernels& k = kernels();
    const int dim = shape_.head_dim;
    const size_t half = frequencies_.size();
    const float* value = row + static_cast<size_t>(query) * dim;
    if (!layer.q_norm.empty()) {
        k.rms_norm(value, layer.q_norm.data(), dim, shape_.eps, room);
        value = room;
    }
    k.rope(value, cosines_.data() + position * half, sines_.data() + position * half, dim, room + dim);
    k.to_bf16(room + dim, dim,
              scratch_->queries.data() + (static_cast<size_t>(at) * shape_.heads + query) * padded(dim, 16));
}

// For layers without keys and values of their own.
void Decoder::write_queries(const Team& team, const LayerWeights& layer, const Rows& rows) {
    Scratch& s = *scratch_;
    const size_t width = static_cast<size_t>(shape_.heads) * shape_.head_dim;
    float* room = s.own[team.thread].row.data();
    for (const Span& span : rows.spans)
        for (int i = 0; i < span.count; ++i) {
            const int at = span.first_row + i;
            if (at % team.threads != team.thread) continue;
            for (int query = 0; query < shape_.heads; ++query)
                put_query(layer, s.qkv.data() + at * width, span.start + i, at, query, room);
        }
}

void Decoder::write_keys_values(const Team& team, const LayerWeights& layer, const Rows& rows, const PagePool& pool,
                                int index, bool queries) {
    const Kernels& k = kernels();
    Scratch& s = *scratch_;
    const int dim = shape_.head_dim, share = shape_.heads / shape_.kv_heads, padded_dim = padded(dim, 16);
    const size_t width = static_cast<size_t>(shape_.heads + 2 * shape_.kv_heads) * dim;
    const size_t half = frequencies_.size();
    float* normed = s.own[team.thread].row.data();
    float* rotated = normed + dim;
    int task = 0;
    for (const Span& span : rows.spans) {
        // Rows of one block of positions share memory words: one thread writes them.
        for (int from = 0; from < span.count;) {
            const int to = std::min(span.count, from + kPositions - (span.start + from) % kPositions);
            for (int head = 0; head < shape_.kv_heads; ++head, ++task) {
                if (task % team.threads != team.thread) continue;
                const KVView kv = pool.view(index, head);
                for (int i = from; i < to; ++i) {
                    const int position = span.start + i, at = position % kPositions;
                    const float* cosines = cosines_.data() + position * half;
                    const float* sines = sines_.data() + position * half;
                    const float* row = s.qkv.data() + (span.first_row + i) * width;
                    uint16_t* block = kv.block(span.pages, position);
                    if (at == 0) std::memset(block, 0, kv.block_bytes());
                    const float* key = row + static_cast<size_t>(shape_.heads + head) * dim;
                    if (!layer.k_norm.empty()) {
                        k.rms_norm(key, layer.k_norm.data(), dim, shape_.eps, normed);
                        key = normed;
                    }
                    k.rope(key, cosines, sines, dim, rotated);
                    uint16_t* narrow = reinterpret_cast<uint16_t*>(rotated + dim);
                    k.to_bf16(rotated, dim, narrow);
                    for (int d = 0; d < dim; d += 2) std::memcpy(block + d * kPositions + 2 * at, narrow + d, 4);
                    k.to_bf16(row + static_cast<size_t>(shape_.heads + shape_.kv_heads + head) * dim, dim, narrow);
                    uint16_t* values = block + kPositions * padded_dim + at / 2 * 2 * padded_dim + at % 2;
                    // Other rows of the block give this one weight 0, and 0 times infinity or NaN would reach them. The
                    // row itself stays broken through its key and the residual stream.
                    for (int d = 0; d < dim; ++d) values[2 * d] = (narrow[d] & 0x7f80) == 0x7f80 ? 0 : narrow[d];
                    if (!queries) continue;
                    for (int query = head * share; query < (head + 1) * share; ++query)
                        put_query(layer, row, position, span.first_row + i, query, normed);
                }
            }
            from = to;
        }
    }
}

// Calls visit(span, key/value head, number of the tile, tile) for the query tiles of a batch.
template <class Visit>
void Decoder::for_tiles(const Rows& rows, int window, bool causal, const Visit& visit) {
    const int dim = shape_.head_dim, share = shape_.heads / shape_.kv_heads, padded_dim = padded(dim, 16);
    int number = 0;
    for (const Span& span : rows.spans) {
        const int queries = span.count * share;
        const int tiles = (queries + kQueries - 1) / kQueries;
        for (int head = 0; head < shape_.kv_heads; ++head) {
            for (int part = 0; part < tiles; ++part, ++number) {
                QueryTile tile;
                const int to = static_cast<int>(static_cast<long>(queries) * (part + 1) / tiles);
                for (int query = static_cast<int>(static_cast<long>(queries) * part / tiles); query < to; ++query) {
                    const int row = span.first_row + query / share, position = span.start + query / share;
                    const size_t at = static_cast<size_t>(row) * shape_.heads + head * share + query % share;
                    tile.queries[tile.rows] = scratch_->queries.data() + at * padded_dim;
                    tile.begin[tile.rows] = window ? std::max(0, position - window + 1) : 0;
                    tile.end[tile.rows] = causal ? position + 1 : span.start + span.count;
                    tile.out[tile.rows] = scratch_->mixed.data() + at * dim;
                    ++tile.rows;
                }
                visit(span, head, number, tile);
            }
        }
    }
}

void Decoder::attend(const Team& team, const Rows& rows, const PagePool& pool, int index, int window, bool causal) {
    const Kernels& k = kernels();
    const int dim = shape_.head_dim, padded_dim = padded(dim, 16);
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    const size_t stride = partial_size(padded_dim);
    const auto steps_of = [](const QueryTile& tile, int& first) {
        int begin = tile.begin[0], end = tile.end[0];
        for (int r = 1; r < tile.rows; ++r) {
            begin = std::min(begin, tile.begin[r]);
            end = std::max(end, tile.end[r]);
        }
        first = begin / kStep;
        return (end + kStep - 1) / kStep - first;
    };
    // Few tiles over a long context: the threads share the steps, and meet before they merge them.
    const bool split = scratch_->split;
    int task = 0, first;
    for_tiles(rows, window, causal, [&](const Span& span, int head, int number, const QueryTile& tile) {
        const int steps = steps_of(tile, first);
        const KVView kv = pool.view(index, head);
        std::vector<float>& own = scratch_->own[team.thread].partials;
        if (!split) {
            if (number % team.threads != team.thread) return;
            if (own.size() < steps * stride) own.resize(steps * stride);
        }
        for (int step = 0; step < steps; ++step, ++task) {
            float* to = split ? scratch_->partials.data() + task * stride : own.data() + step * stride;
            // Who has a head's keys and values of a step in its cache takes all tiles over them.
            if (split && (head + first + step) % team.threads != team.thread) continue;
            k.attention_step(kv, span.pages, tile, (first + step) * kStep, scale, to);
        }
        if (!split) k.attention_merge(tile, own.data(), steps, stride, dim, padded_dim);
    });
    if (!split) return;
    team.barrier();
    task = 0;
    for_tiles(rows, window, causal, [&](const Span&, int, int number, const QueryTile& tile) {
        const int steps = steps_of(tile, first);
        if (number % team.threads == team.thread)
            k.attention_merge(tile, scratch_->partials.data() + task * stride, steps, stride, dim, padded_dim);
        task += steps;
    });
}

void Decoder::forward(float* hidden, const float* attention_input, const Rows& rows, PagePool& pool,
                      const std::vector<int>& tap_layers, float* taps, const std::vector<int>& windows,
                      const std::vector<bool>& causal) {
    check(pool);
    const Kernels& k = kernels();
    const int count = rows.count, width = shape_.hidden, dim = shape_.head_dim;
    const int heads = shape_.heads * dim;
    Scratch& s = *scratch_;
    const auto work = [&](const Team& team) {
        Scratch::Own& own = s.own[team.thread];
        const bool few = count <= kFewRows || team.threads == 1;
        int begin = 0, end = count;
        if (!few) team.share(count, 1, begin, end);
        // Rows begin to end as activations of a matrix, normed first if there is a norm.
        const auto activations = [&](const float* x, int size, const float* norm, Format format) -> const Activations& {
            const Activations& to = few ? own.activations.fit(count, size) : s.shared.view();
            Activations sized = to;
            sized.blocks = padded(size, kBlock) / kBlock;
            for (int row = begin; row < end; ++row) {
                const float* values = x + static_cast<size_t>(row) * size;
                if (norm) {
                    k.rms_norm(values, norm, size, shape_.eps, own.row.data());
                    values = own.row.data();
                }
                k.activate(values, size, 0, size, format, sized, row);
            }
            if (!few) team.barrier();
            return to;
        };
        for (int index = 0; index < layers(); ++index) {
            const LayerWeights& layer = layers_[index];
            const MatrixView& qkv = layer.qkv->view();
            multiply(team, *layer.qkv,
                     index == 0 && attention_input ? activations(attention_input, qkv.k, nullptr, qkv.format)
                                                   : activations(hidden, width, layer.input_norm.data(), qkv.format),
                     count, optional(layer.qkv_bias), false, s.qkv.data(), qkv.n);
            team.barrier();
            if (kv_layers_.empty())
                write_keys_values(team, layer, rows, pool, index, true);
            else
                write_queries(team, layer, rows);
            team.barrier();
            attend(team, rows, pool, kv_layers_.empty() ? index : kv_layers_[index], windows[index], causal[index]);
            fetch(team, *layer.out);
            team.barrier();
            multiply(team, *layer.out, activations(s.mixed.data(), heads, nullptr, layer.out->view().format), count,
                     optional(layer.out_bias), true, hidden, width);
            fetch(team, *layer.gate);
            team.barrier();
            const Activations& normed =
                activations(hidden, width, layer.post_norm.data(), layer.gate->view().format);
            int first, last;
            team.share(layer.gate->view().panels, 1, first, last);
            k.linear(layer.gate->view(), normed, count, first, last, optional(layer.gate_bias), false, s.gate.data(),
                     shape_.inner);
            k.linear(layer.up->view(), normed, count, first, last, optional(layer.up_bias), false, s.up.data(),
                     shape_.inner);
            const int from = first * kPanel, to = std::min(last * kPanel, shape_.inner);
            for (int row = 0; row < count && from < to; ++row) {
                float* gate = s.gate.data() + static_cast<size_t>(row) * shape_.inner;
                k.silu_mul(gate + from, s.up.data() + static_cast<size_t>(row) * shape_.inner + from, to - from,
                           gate + from);
                k.activate(gate, shape_.inner, from, to, layer.down->view().format, s.gated.view(), row);
            }
            fetch(team, *layer.down);
            team.barrier();
            multiply(team, *layer.down, s.gated.view(), count, optional(layer.down_bias), true, hidden, width);
            if (index + 1 < layers()) fetch(team, *layers_[index + 1].qkv);
            team.barrier();
            for (size_t tap = 0; tap < tap_layers.size(); ++tap) {
                if (tap_layers[tap] != index) continue;
                int from_row, to_row;
                team.share(count, 1, from_row, to_row);
                for (int row = from_row; row < to_row; ++row)
                    std::memcpy(taps + (static_cast<size_t>(row) * tap_layers.size() + tap) * width,
                                hidden + static_cast<size_t>(row) * width, sizeof(float) * width);
            }
        }
    };
    ThreadPool::instance().run(work, [&](int threads) { prepare(rows, threads); });
}

void Decoder::inject(const float* context, const Rows& rows, PagePool& pool) {
    check(pool);
    const Kernels& k = kernels();
    const int count = rows.count, dim = shape_.head_dim;
    const int heads = shape_.heads * dim, qkv = heads + 2 * shape_.kv_heads * dim;
    Scratch& s = *scratch_;
    const auto work = [&](const Team& team) {
        int begin, end;
        for (int index = 0; index < layers(); ++index) {
            const LayerWeights& layer = layers_[index];
            const MatrixView& weight = layer.qkv->view();
            Activations x = s.shared.view();
            x.blocks = weight.blocks;
            if (index == 0 || layers_[index - 1].qkv->view().format != weight.format) {
                team.share(count, 1, begin, end);
                for (int row = begin; row < end; ++row)
                    k.activate(context + static_cast<size_t>(row) * shape_.hidden, shape_.hidden, 0, shape_.hidden,
                               weight.format, x, row);
                team.barrier();
            }
            const int skipped = heads / kPanel;
            team.share(weight.panels - skipped, 1, begin, end);
            k.linear(weight, x, count, skipped + begin, skipped + end, optional(layer.qkv_bias), false, s.qkv.data(), qkv);
            team.barrier();
            write_keys_values(team, layer, rows, pool, index, false);
            team.barrier();
        }
    };
    ThreadPool::instance().run(work, [&](int threads) { prepare(rows, threads); });
}

void linear(const Matrix& weight, const float* x, int rows, const float* bias, float* out) {
    static ActivationBuffer buffer;
    static std::mutex busy;
    const std::lock_guard<std::mutex> lock(busy);
    const MatrixView& view = weight.view();
    const Activations& shared = buffer.fit(rows, view.k);
    ThreadPool::instance().run([&](const Team& team) {
        int begin, end;
        team.share(rows, 1, begin, end);
        for (int row = begin; row < end; ++row)
            kernels().activate(x + static_cast<size_t>(row) * view.k, view.k, 0, view.k, view.format, shared, row);
        team.barrier();
        multiply(team, weight, shared, rows, bias, false, out, view.n);
    });
}

void rms_norm(const float* x, const float* weight, int rows, int k, float eps, float* out) {
    for (int row = 0; row < rows; ++row)
        kernels().rms_norm(x + static_cast<size_t>(row) * k, weight, k, eps, out + static_cast<size_t>(row) * k);
}

void silu_mul(const float* gate_up, int rows, int inner, float* out) {
    for (int row = 0; row < rows; ++row) {
        const float* gate = gate_up + static_cast<size_t>(row) * 2 * inner;
        kernels().silu_mul(gate, gate + inner, inner, out + static_cast<size_t>(row) * inner);
    }
}

void rope(const float* x, const float* cosines, const float* sines, int rows, int heads, int head_dim, float* out) {
    for (int row = 0; row < rows; ++row)
        for (int head = 0; head < heads; ++head) {
            const size_t at = (static_cast<size_t>(row) * heads + head) * head_dim;
            kernels().rope(x + at, cosines + static_cast<size_t>(row) * head_dim,
                           sines + static_cast<size_t>(row) * head_dim, head_dim, out + at);
        }
}

void argmax(const float* x, int rows, int count, int64_t* out) {
    ThreadPool::instance().run([&](const Team& team) {
        for (int row = team.thread; row < rows; row += team.threads)
            out[row] = kernels().argmax(x + static_cast<size_t>(row) * count, count);
    });
}

void best(const float* x, int rows, int count, int64_t* ids, float* log_probs) {
    const int steps = (count + kBestStep - 1) / kBestStep;
    std::vector<Peak> peaks(static_cast<size_t>(rows) * steps);
    ThreadPool::instance().run([&](const Team& team) {
        int begin, end;
        team.share(rows * steps, 1, begin, end);
        for (int task = begin; task < end; ++task) {
            const int first = task % steps * kBestStep;
            peaks[task] = kernels().peak(x + static_cast<size_t>(task / steps) * count + first,
                                         std::min(kBestStep, count - first));
        }
    });
    for (int row = 0; row < rows; ++row) {
        const Peak* own = peaks.data() + static_cast<size_t>(row) * steps;
        float top = -std::numeric_limits<float>::infinity();
        bool broken = false;
        ids[row] = 0;
        for (int step = 0; step < steps; ++step) {
            broken |= own[step].broken;
            if (!(own[step].top > top)) continue;
            top = own[step].top;
            ids[row] = static_cast<int64_t>(step) * kBestStep + own[step].at;
        }
        if (broken) ids[row] = kernels().argmax(x + static_cast<size_t>(row) * count, count);
        double mass = 0.0;
        for (int step = 0; step < steps; ++step)
            mass += own[step].mass * std::exp(static_cast<double>(own[step].top) - top);
        const bool none = broken || top == -std::numeric_limits<float>::infinity();
        log_probs[row] = none ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(-std::log(mass));
    }
}

void embedding(const Matrix& table, const int64_t* ids, int rows, float* out) {
    ThreadPool::instance().run([&](const Team& team) {
        for (int row = team.thread; row < rows; row += team.threads)
            kernels().row(table.view(), static_cast<int>(ids[row]), out + static_cast<size_t>(row) * table.view().k);
    });
}

}  // namespace foredraft
