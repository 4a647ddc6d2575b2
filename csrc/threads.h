// A pool of threads that run one function together, with a barrier for the steps inside it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace foredraft {

// Logical processors this process may use (its affinity mask where the system has one).
int available_threads();

// Called by every thread of a region: `thread` is 0 to `threads` - 1, `barrier()` waits for all of them.
class Team {
   public:
    Team(int thread, int threads, std::atomic<int>& arrived, std::atomic<int>& phase)
        : thread(thread), threads(threads), arrived_(arrived), phase_(phase) {}

    const int thread;
    const int threads;

    void barrier() const;

    // This thread's share of `count` items, in units of `unit` (the last share may be short).
    void share(int count, int unit, int& begin, int& end) const;

   private:
    std::atomic<int>& arrived_;
    std::atomic<int>& phase_;
};

class ThreadPool {
   public:
    static ThreadPool& instance();

    // Takes effect with the next region. Raises std::invalid_argument below 1.
    void set_threads(int threads);
    int threads() const { return threads_; }

    // Runs `work` on every thread, the caller's included. One region at a time: others wait for their turn. `prepare`
    // runs first, within the turn, with the number of threads.
    void run(const std::function<void(const Team&)>& work, const std::function<void(int)>& prepare = {});

   private:
    ThreadPool();
    void start(int workers);
    void stop();
    void worker(int thread, unsigned seen);

    std::mutex turn_;
    std::mutex sleep_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    int threads_ = 1;
    long owner_ = 0;
    std::atomic<bool> stopping_{false};
    std::atomic<unsigned> generation_{0};
    std::atomic<int> unfinished_{0};
    std::atomic<int> arrived_{0};
    std::atomic<int> phase_{0};
    const std::function<void(const Team&)>* work_ = nullptr;
};

}  // namespace foredraft
