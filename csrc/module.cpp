// The Python module foredraft._native. Arrays of the hot path come as addresses: their owner, src/foredraft/ops/native.py
// and models/native.py, checks shapes and types.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "decoder.h"
#include "noise.h"

namespace nb = nanobind;
using namespace foredraft;
using Address = uintptr_t;

namespace {

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

using Ints = nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>;

// starts, counts: [sequences]; pages: [sequences, most pages of one].
Rows rows_of(const Ints& starts, const Ints& counts, const Ints& pages, const PagePool& pool) {
    if (starts.ndim() != 1 || counts.ndim() != 1 || pages.ndim() != 2 || starts.shape(0) != counts.shape(0) ||
        starts.shape(0) != pages.shape(0))
        throw std::invalid_argument("starts and counts must be [sequences], pages [sequences, pages]");
    Rows rows;
    for (size_t i = 0; i < starts.shape(0); ++i) {
        const int start = starts.data()[i], count = counts.data()[i];
        if (start < 0 || count < 0) throw std::invalid_argument("starts and counts must not be negative");
        const int needed = (start + count + static_cast<int>(kPagePositions) - 1) / static_cast<int>(kPagePositions);
        const int32_t* own = pages.data() + i * pages.shape(1);
        if (needed > static_cast<int>(pages.shape(1))) throw std::invalid_argument("a sequence has too few pages");
        for (int page = 0; page < needed; ++page)
            if (own[page] < 0 || own[page] >= pool.pages()) throw std::invalid_argument("a page does not exist");
        rows.spans.push_back({rows.count, count, start, own});
        rows.count += count;
    }
    return rows;
}

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native CPU kernels. See src/foredraft/ops/native.py for what each function means.";
    m.attr("PAGE_POSITIONS") = static_cast<int>(kPagePositions);

    m.def("isa", [] { return std::string(kernels().name); });
    m.def("available_threads", &available_threads);
    m.def("threads", [] { return ThreadPool::instance().threads(); });
    m.def("set_threads", [](int threads) { ThreadPool::instance().set_threads(threads); });

    nb::enum_<Format>(m, "Format")
        .value("bf16", Format::bf16)
        .value("int8", Format::int8)
        .value("mxfp4", Format::mxfp4)
        .value("mxfp4_a16", Format::mxfp4_a16);

    nb::class_<Matrix>(m, "Matrix")
        .def_static(
            "from_bf16",
            [](Address weights, int n, int k, Format format) {
                nb::gil_scoped_release release;
                return Matrix::from_bf16(at<const uint16_t>(weights), n, k, format);
            },
            nb::arg("weights"), nb::arg("n"), nb::arg("k"), nb::arg("format"))
        .def_static(
            "from_mxfp4",
            [](Address codes, Address scales, int n, int k, Format format) {
                nb::gil_scoped_release release;
                return Matrix::from_mxfp4(at<const uint8_t>(codes), at<const uint8_t>(scales), n, k, format);
            },
            nb::arg("codes"), nb::arg("scales"), nb::arg("n"), nb::arg("k"), nb::arg("format"))
        .def_prop_ro("format", [](const Matrix& matrix) { return matrix.view().format; })
        .def_prop_ro("shape", [](const Matrix& matrix) { return nb::make_tuple(matrix.view().n, matrix.view().k); })
        .def_prop_ro("nbytes", &Matrix::bytes);

    nb::class_<PagePool>(m, "PagePool")
        .def(nb::init<int, int, int>(), nb::arg("layers"), nb::arg("kv_heads"), nb::arg("head_dim"))
        .def("reserve", &PagePool::reserve)
        .def_prop_ro("page_bytes", &PagePool::page_bytes)
        .def_prop_ro("nbytes", &PagePool::bytes)
        .def_prop_ro("pages", &PagePool::pages);

    nb::class_<LayerWeights>(m, "LayerWeights")
        .def(
            "__init__",
            [](LayerWeights* self, std::shared_ptr<Matrix> qkv, std::shared_ptr<Matrix> out, std::shared_ptr<Matrix> gate,
               std::shared_ptr<Matrix> up, std::shared_ptr<Matrix> down, nb::dict vectors) {
                const auto vector = [&](const char* name, size_t unit) {
                    if (!vectors.contains(name)) return std::vector<float>();
                    const Floats array = nb::cast<Floats>(vectors[name]);
                    std::vector<float> values(array.data(), array.data() + array.size());
                    values.resize((values.size() + unit - 1) / unit * unit);
                    return values;
                };
                new (self) LayerWeights{vector("input_norm", 1),       vector("q_norm", 1),
                                        vector("k_norm", 1),           vector("post_norm", 1),
                                        vector("qkv_bias", kPanel),    vector("out_bias", kPanel),
                                        vector("gate_bias", kPanel),   vector("up_bias", kPanel),
                                        vector("down_bias", kPanel),   std::move(qkv),
                                        std::move(out),                std::move(gate),
                                        std::move(up),                 std::move(down)};
            },
            nb::arg("qkv"), nb::arg("out"), nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("vectors"));

    nb::class_<Decoder>(m, "Decoder")
        .def(
            "__init__",
            [](Decoder* self, int hidden, int inner, int heads, int kv_heads, int head_dim, float eps,
               nb::list layers, std::vector<float> frequencies, float factor, std::vector<int> kv_layers) {
                std::vector<LayerWeights> weights;
                for (nb::handle layer : layers) weights.push_back(nb::cast<const LayerWeights&>(layer));
                new (self) Decoder({hidden, inner, heads, kv_heads, head_dim, eps}, std::move(weights),
                                   std::move(frequencies), factor, std::move(kv_layers));
            },
            nb::arg("hidden"), nb::arg("inner"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
            nb::arg("eps"), nb::arg("layers"), nb::arg("frequencies"), nb::arg("factor"),
            nb::arg("kv_layers") = std::vector<int>())
        .def(
            "forward",
            [](Decoder& self, Address hidden, Ints starts, Ints counts, Ints pages, PagePool& pool,
               const std::vector<int>& tap_layers, Address taps, const std::vector<int>& windows,
               const std::vector<bool>& causal, Address attention_input) {
                const Rows rows = rows_of(starts, counts, pages, pool);
                nb::gil_scoped_release release;
                self.forward(at<float>(hidden), at<const float>(attention_input), rows, pool, tap_layers,
                             at<float>(taps), windows, causal);
            },
            nb::arg("hidden"), nb::arg("starts"), nb::arg("counts"), nb::arg("pages"), nb::arg("pool"),
            nb::arg("tap_layers"), nb::arg("taps"), nb::arg("windows"), nb::arg("causal"),
            nb::arg("attention_input") = 0)
        .def(
            "inject",
            [](Decoder& self, Address context, Ints starts, Ints counts, Ints pages, PagePool& pool) {
                const Rows rows = rows_of(starts, counts, pages, pool);
                nb::gil_scoped_release release;
                self.inject(at<const float>(context), rows, pool);
            },
            nb::arg("context"), nb::arg("starts"), nb::arg("counts"), nb::arg("pages"), nb::arg("pool"))
        .def_prop_ro("attention_width", &Decoder::attention_width)
        .def_prop_ro("weight_bytes", &Decoder::weight_bytes);

    m.def("linear", [](const Matrix& weight, Address x, int rows, Address bias, Address out) {
        nb::gil_scoped_release release;
        linear(weight, at<const float>(x), rows, at<const float>(bias), at<float>(out));
    });
    m.def("rms_norm", [](Address x, Address weight, int rows, int k, float eps, Address out) {
        nb::gil_scoped_release release;
        rms_norm(at<const float>(x), at<const float>(weight), rows, k, eps, at<float>(out));
    });
    m.def("silu_mul", [](Address gate_up, int rows, int inner, Address out) {
        nb::gil_scoped_release release;
        silu_mul(at<const float>(gate_up), rows, inner, at<float>(out));
    });
    m.def("rope", [](Address x, Address cosines, Address sines, int rows, int heads, int head_dim, Address out) {
        nb::gil_scoped_release release;
        rope(at<const float>(x), at<const float>(cosines), at<const float>(sines), rows, heads, head_dim, at<float>(out));
    });
    m.def("argmax", [](Address x, int rows, int count, Address out) {
        nb::gil_scoped_release release;
        argmax(at<const float>(x), rows, count, at<int64_t>(out));
    });
    m.def("best", [](Address x, int rows, int count, Address ids, Address log_probs) {
        nb::gil_scoped_release release;
        best(at<const float>(x), rows, count, at<int64_t>(ids), at<float>(log_probs));
    });
    m.def("embedding", [](const Matrix& table, Address ids, int rows, Address out) {
        nb::gil_scoped_release release;
        embedding(table, at<const int64_t>(ids), rows, at<float>(out));
    });
    m.def("release_free_memory", &release_free_memory);
    m.def("quantize_mxfp4", [](Address weights, int n, int k, Address codes, Address scales) {
        nb::gil_scoped_release release;
        quantize_mxfp4(at<const uint16_t>(weights), n, k, at<uint8_t>(codes), at<uint8_t>(scales));
    });
    m.def(
        "gumbel_argmax",
        [](Address scores, int count, uint64_t seed, uint64_t position, uint32_t stream, Address ids) {
            nb::gil_scoped_release release;
            return gumbel_argmax(at<const float>(scores), at<const int64_t>(ids), count, seed, position, stream);
        },
        nb::arg("scores"), nb::arg("count"), nb::arg("seed"), nb::arg("position"), nb::arg("stream"),
        nb::arg("ids") = 0);
}
