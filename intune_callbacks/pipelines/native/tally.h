// What the closures of a stage cost, at a cost that even short ones can bear.
#pragma once

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

namespace intune {

class Pool;

inline double Seconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// What computing has cost so far: `busy_s2` sums the squares of whole calls.
struct Tally {
  int64_t closures = 0;
  double busy_s = 0.0, busy_s2 = 0.0, cpu_s = 0.0;
};

// The closures that work on one element: the first, and those that were begun inside one of them.
struct Call {
  double busy_s = 0.0;  // so far; under the pool's lock
};
using CallPtr = std::shared_ptr<Call>;

// The call a thread computes for, and whose. There is a `Call` only where it has a second closure.
struct Current {
  const Pool* pool = nullptr;
  CallPtr call;
};

// To ask for a thread's CPU time is a call of the kernel: too much for each of many short closures.
class Stopwatch {
 public:
  explicit Stopwatch(bool with_cpu) : with_cpu_(with_cpu), cpu_s_(with_cpu ? Seconds(CLOCK_THREAD_CPUTIME_ID) : 0.0) {}

  // `cpu_s` is negative where it was not measured.
  void Stop(Tally* tally) const {
    tally->closures = 1;
    tally->busy_s = Seconds(CLOCK_MONOTONIC) - wall_s_;
    tally->cpu_s = with_cpu_ ? Seconds(CLOCK_THREAD_CPUTIME_ID) - cpu_s_ : -1.0;
  }

 private:
  const bool with_cpu_;
  const double cpu_s_, wall_s_ = Seconds(CLOCK_MONOTONIC);
};

// All of a stage. Where closures are short, to time each would cost a good part of what they do: one stands for some
// others. `Wanted` and `Untimed` are called from any thread, the rest under the pool's lock.
class Costs {
 public:
  // Whether the next closure is one that is timed, its CPU time included.
  bool Wanted() {
    const int every = every_.load(std::memory_order_relaxed);
    return every <= 1 || asked_.fetch_add(1, std::memory_order_relaxed) % every == 0;
  }

  void Untimed() { untimed_.fetch_add(1, std::memory_order_relaxed); }

  // Counts what was computed elsewhere.
  void Add(const Tally& tally) {
    tally_.closures += tally.closures;
    tally_.busy_s += tally.busy_s;
    tally_.busy_s2 += tally.busy_s2;
    tally_.cpu_s += tally.cpu_s;
  }

  // Counts one closure of a call; null where it is the only one.
  void Add(const Tally& tally, Call* call) {
    const double before_s = call == nullptr ? 0.0 : call->busy_s;
    if (call != nullptr) call->busy_s += tally.busy_s;
    timed_ = std::min(timed_ + 1, kMeanOver);
    mean_s_ += (tally.busy_s - mean_s_) / timed_;
    if (tally.cpu_s >= 0.0) mean_cpu_s_ += (tally.cpu_s - mean_cpu_s_) / timed_;
    // Where its CPU time was not asked for, the closure is taken to be one like the others.
    Add({tally.closures, tally.busy_s, tally.busy_s * (tally.busy_s + 2.0 * before_s),  // (a + b)^2 - a^2
         tally.cpu_s >= 0.0 ? tally.cpu_s : std::min(tally.busy_s, mean_cpu_s_)});
    const bool is_known = timed_ == kMeanOver;
    every_.store(is_known && mean_s_ < 0.2 * kShort_s ? 64 : is_known && mean_s_ < kShort_s ? 16 : 1,
                 std::memory_order_relaxed);
  }

  // Counts those nobody timed by the mean: one that was may be the first closure of its call or a later one, they are
  // of all kinds.
  void AddUntimed() {
    const int others = untimed_.exchange(0, std::memory_order_relaxed);
    Add({others, others * mean_s_, others * mean_s_ * mean_s_, others * std::min(mean_s_, mean_cpu_s_)});
  }

  const Tally& tally() const { return tally_; }

 private:
  static constexpr double kShort_s = 50e-6;
  static constexpr int kMeanOver = 16;  // closures

  std::atomic<int> every_{1}, asked_{0}, untimed_{0};
  int timed_ = 0;
  double mean_s_ = 0.0, mean_cpu_s_ = 0.0;
  Tally tally_;
};

}  // namespace intune
