// Prints the GB/s (10^9 bytes) at which memory is read: bandwidth THREADS MEBIBYTES PASSES, the best of the passes.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

// How many streams and how far ahead is best differs between processors, so that several are tried.
template <size_t Streams, size_t Ahead>
static uint64_t sum(const uint64_t* data, size_t count) {
    constexpr size_t step = 32;
    const size_t length = count / Streams / step * step;
    uint64_t totals[step] = {};
    for (size_t i = 0; i < length; i += step)
        for (size_t s = 0; s < Streams; ++s) {
            const uint64_t* here = data + s * length + i;
            for (size_t j = 0; Ahead && j < step; j += 8) __builtin_prefetch(here + Ahead / sizeof(uint64_t) + j);
            for (size_t j = 0; j < step; ++j) totals[j] += here[j];
        }
    uint64_t all = 0;
    for (uint64_t total : totals) all += total;
    return all;
}

int main(int, char** arguments) {
    using Sum = uint64_t (*)(const uint64_t*, size_t);
    const Sum variants[] = {sum<1, 0>, sum<2, 0>, sum<4, 0>, sum<1, 4096>, sum<2, 2048>, sum<4, 1024>};
    const size_t threads = std::atoi(arguments[1]);
    const size_t count = (std::strtoull(arguments[2], nullptr, 10) << 20) / sizeof(uint64_t) / threads;
    std::vector<std::vector<uint64_t>> parts(threads);
    std::vector<uint64_t> sums(threads);
    const auto seconds = [&](auto work) {
        std::vector<std::thread> workers;
        const auto begin = std::chrono::steady_clock::now();
        for (size_t t = 0; t < threads; ++t) workers.emplace_back(work, t);
        for (auto& worker : workers) worker.join();
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    seconds([&](size_t t) { parts[t].assign(count, t + 1); });  // first touched where it is read
    double best = 1e30;
    for (int pass = 0; pass < std::atoi(arguments[3]); ++pass)
        for (const Sum variant : variants)
            best = std::min(best, seconds([&](size_t t) { sums[t] += variant(parts[t].data(), count); }));
    std::printf("%.2f\n", count * threads * sizeof(uint64_t) / best / 1e9);
    return sums[0] == 1;  // the sums are used, so that they are computed
}
