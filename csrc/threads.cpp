#include "threads.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace foredraft {
namespace {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spin while the wait is likely to be short, then let other threads have the processor: on a busy machine the
// thread that is waited for may need it.
constexpr int kSpins = 2000;
constexpr auto kAwake = std::chrono::milliseconds(2);

long process() {
#if defined(__unix__) || defined(__APPLE__)
    return getpid();
#else
    return 1;
#endif
}

std::vector<int> affinity() {
    std::vector<int> processors;
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
            if (CPU_ISSET(cpu, &set)) processors.push_back(cpu);
#endif
    return processors;
}

// FOREDRAFT_PIN=1 binds each worker to a processor of its own, out of those the process may use.
void pin(int thread, const std::vector<int>& processors) {
#if defined(__linux__)
    const char* wanted = std::getenv("FOREDRAFT_PIN");
    if (!wanted || std::strcmp(wanted, "1") != 0 || processors.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(processors[thread % processors.size()], &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
    (void)thread;
    (void)processors;
#endif
}

}  // namespace

int available_threads() {
    const int allowed = static_cast<int>(affinity().size());
    return std::max(1, allowed ? allowed : static_cast<int>(std::thread::hardware_concurrency()));
}

void Team::barrier() const {
    if (threads == 1) return;
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
        if (spins < kSpins)
            pause();
        else
            std::this_thread::yield();
    }
}

void Team::share(int count, int unit, int& begin, int& end) const {
    const int units = (count + unit - 1) / unit;
    begin = std::min(count, static_cast<int>(static_cast<long>(units) * thread / threads) * unit);
    end = std::min(count, static_cast<int>(static_cast<long>(units) * (thread + 1) / threads) * unit);
}

ThreadPool& ThreadPool::instance() {
    // Never destroyed: workers may still be asleep in it when static objects are torn down.
    static ThreadPool* pool = new ThreadPool;
    return *pool;
}

ThreadPool::ThreadPool() {
    threads_ = available_threads();
    for (const char* name : {"OMP_NUM_THREADS", "FOREDRAFT_THREADS"}) {
        const char* value = std::getenv(name);
        if (value && std::atoi(value) > 0) threads_ = std::atoi(value);
    }
}

void ThreadPool::set_threads(int threads) {
    if (threads < 1) throw std::invalid_argument("the number of threads must be at least 1");
    std::lock_guard<std::mutex> turn(turn_);
    threads_ = threads;
}

void ThreadPool::start(int workers) {
    if (owner_ != process()) {
        // After a fork the workers are gone, though their handles are still here.
        for (std::thread& thread : workers_) thread.detach();
        workers_.clear();
        owner_ = process();
    }
    if (static_cast<int>(workers_.size()) == workers) return;
    stop();
    stopping_ = false;
    const unsigned seen = generation_.load();
    for (int index = 0; index < workers; ++index)
        workers_.emplace_back([this, index, seen] { worker(index + 1, seen); });
}

void ThreadPool::stop() {
    {
        std::lock_guard<std::mutex> lock(sleep_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : workers_) thread.join();
    workers_.clear();
}

void ThreadPool::run(const std::function<void(const Team&)>& work, const std::function<void(int)>& prepare) {
    std::lock_guard<std::mutex> turn(turn_);
    start(threads_ - 1);
    if (prepare) prepare(threads_);
    const Team team(0, threads_, arrived_, phase_);
    if (threads_ > 1) {
        work_ = &work;
        unfinished_.store(threads_ - 1, std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> lock(sleep_);
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
    }
    work(team);
    for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0; ++spins) {
        if (spins < kSpins)
            pause();
        else
            std::this_thread::yield();
    }
}

void ThreadPool::worker(int thread, unsigned seen) {
    pin(thread, affinity());
    for (;;) {
        const auto until = std::chrono::steady_clock::now() + kAwake;
        while (generation_.load(std::memory_order_acquire) == seen && !stopping_) {
            for (int spins = 0; spins < 64 && generation_.load(std::memory_order_relaxed) == seen; ++spins) pause();
            if (generation_.load(std::memory_order_relaxed) != seen) break;
            if (std::chrono::steady_clock::now() > until) {
                std::unique_lock<std::mutex> lock(sleep_);
                wake_.wait(lock, [&] { return generation_.load() != seen || stopping_; });
            }
        }
        if (stopping_) return;
        seen = generation_.load(std::memory_order_acquire);
        const Team team(thread, threads_, arrived_, phase_);
        (*work_)(team);
        unfinished_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace foredraft
