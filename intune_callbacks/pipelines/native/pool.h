// The resizable pool of one tf.data stage: at most `limit` closures compute at once, and the limit changes live.
//
// A closure is never dropped: tf.data iterators wait in their destructor for every closure they have scheduled, so a
// pool that forgot one would hang the program. Threads hold the pool, not the other way round; one that has had
// nothing to do for `kIdle` ends, so a released pool frees itself and nothing is joined at process exit.
#ifndef INTUNE_POOL_H_
#define INTUNE_POOL_H_

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "tensorflow/core/platform/denormal.h"
#include "tensorflow/core/platform/setround.h"
#include "tensorflow/core/util/work_sharder.h"

namespace intune {

using Closure = std::function<void()>;
using Runner = std::function<void(Closure)>;

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

class Pool;

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

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  struct Counters {
    Tally tally;
    int limit, running, waiting, threads;
  };

  // Runs `fn` on this pool, or on `base` (timed all the same) while the limit is 0. `owner` names the iterator it
  // belongs to. `intra_op` bounds the parallelism inside one operation; negative leaves it as it is.
  void Run(Closure fn, const Runner& base, const void* owner, int intra_op) {
    CallPtr call;
    if (Current& now = this_call(); now.pool == this) {
      if (!now.call) now.call = std::make_shared<Call>();
      call = now.call;
    }
    if (limit_.load(std::memory_order_relaxed) > 0) {
      std::unique_lock<std::mutex> lock(mu_);
      if (limit_ > 0 && (threads_ > 0 || Spawn())) {
        const bool nested = current() == this, hurried = Hurried(owner);
        (hurried ? hurried_ : nested ? nested_ : queue_).push_back({std::move(fn), std::move(call), owner, intra_op});
        if (Startable()) Wake();
        return;
      }
    }
    // Where closures are short, to time each would cost a good part of what they do: one stands for some others.
    if (!call && !AskForCpu()) {
      untimed_.fetch_add(1, std::memory_order_relaxed);
      base(std::move(fn));
      return;
    }
    base([self = shared_from_this(), fn = std::move(fn), call = std::move(call)]() mutable {
      self->RunOnBase(std::move(fn), std::move(call));
    });
  }

  void SetLimit(int limit) {
    std::unique_lock<std::mutex> lock(mu_);
    if (limit_ > 0) drain_ = limit_;
    limit_ = limit;
    if (Startable()) Wake();
  }

  // The iterator `owner` is being destroyed and waits for its closures, whose results nobody wants any more: they do
  // not count against the limit. Without this the end of an iterator takes window / limit times a closure.
  void Hurry(const void* owner) {
    std::unique_lock<std::mutex> lock(mu_);
    ending_.push_back(owner);
    for (std::deque<Entry>* from : {&nested_, &queue_}) {
      const auto theirs = [owner](const Entry& entry) { return entry.owner != owner; };
      const auto middle = std::stable_partition(from->begin(), from->end(), theirs);
      std::move(middle, from->end(), std::back_inserter(hurried_));
      from->erase(middle, from->end());
    }
    if (Startable()) Wake();
  }

  void Gone(const void* owner) {
    std::unique_lock<std::mutex> lock(mu_);
    ending_.erase(std::remove(ending_.begin(), ending_.end(), owner), ending_.end());
  }

  // Counts what was computed elsewhere.
  void Add(const Tally& tally) {
    std::unique_lock<std::mutex> lock(mu_);
    tally_.closures += tally.closures;
    tally_.busy_s += tally.busy_s;
    tally_.busy_s2 += tally.busy_s2;
    tally_.cpu_s += tally.cpu_s;
  }

  Counters Read() {
    std::unique_lock<std::mutex> lock(mu_);
    const size_t waiting = queue_.size() + nested_.size() + hurried_.size();
    return {tally_, limit_, computing_ + elsewhere_, static_cast<int>(waiting), threads_};
  }

 private:
  struct Entry {
    Closure fn;
    CallPtr call;
    const void* owner = nullptr;
    int intra_op = -1;
    int* counter = nullptr;  // of those that compute under the same limit
  };
  struct Waiter {
    std::condition_variable awake;
    bool called = false;
  };
  using Duration = std::chrono::milliseconds;
  static constexpr Duration kIdle{2000}, kShortestStall{10};
  static constexpr double kShort_s = 50e-6;
  static constexpr int kMeanOver = 16;  // closures

  static Pool*& current() {
    static thread_local Pool* pool = nullptr;
    return pool;
  }

  static Current& this_call() {
    static thread_local Current current;
    return current;
  }

  // With the limit at 0 what is queued already still has to run.
  int Limit() const { return limit_ > 0 ? limit_.load() : drain_; }

  bool Hurried(const void* owner) const {
    return std::find(ending_.begin(), ending_.end(), owner) != ending_.end();
  }

  // Closures other closures may be waiting for.
  int Parts() const { return static_cast<int>(nested_.size() + hurried_.size()); }

  // Whether one more thread would find something to do, be it to look out for a stall.
  bool Startable() const {
    if (Parts() > 0 && watchers_ == 0 && waking_ == 0) return true;
    const int queued = static_cast<int>(queue_.size() + nested_.size()), hurried = static_cast<int>(hurried_.size());
    int room = std::max(0, std::min(queued, Limit() - running_));
    room += std::max(0, std::min(hurried, HurriedLimit() - hurrying_));
    return (stalled_ ? std::max(room, Parts()) : room) > waking_;
  }

  bool Take(Entry* entry) {
    const bool room = running_ < Limit(), hurried_room = hurrying_ < HurriedLimit();
    std::deque<Entry>* from = nullptr;
    int* counter = &running_;
    if (!nested_.empty() && (room || stalled_)) {
      from = &nested_;  // finish a call before starting the next one
      if (!room) counter = &unbound_;
    } else if (!hurried_.empty() && (hurried_room || stalled_)) {
      from = &hurried_;
      counter = hurried_room ? &hurrying_ : &unbound_;
    } else if (!queue_.empty() && room) {
      from = &queue_;
    } else {
      return false;
    }
    *entry = std::move(from->front());
    from->pop_front();
    entry->counter = counter;
    ++*counter;
    ++computing_;
    return true;
  }

  static int HurriedLimit() {
    static const int limit = std::max(16, static_cast<int>(std::thread::hardware_concurrency()));
    return limit;
  }

  void Wake() {
    if (idle_.empty()) {
      Spawn();
      return;
    }
    Waiter* waiter = idle_.back();  // the one that slept least: its stack is still in the cache, the others may end
    idle_.pop_back();
    waiter->called = true;
    ++waking_;
    waiter->awake.notify_one();
  }

  bool Spawn() {
    try {
      std::thread(&Pool::Work, shared_from_this()).detach();
    } catch (const std::system_error&) {
      return false;  // no more threads to be had: those there are go on
    }
    ++threads_;
    ++waking_;
    return true;
  }

  static void Work(std::shared_ptr<Pool> pool) {
    // As TensorFlow's own compute threads: results must not depend on which pool computed them.
    tensorflow::port::ScopedFlushDenormal flush;
    tensorflow::port::ScopedSetRound round(FE_TONEAREST);
    pthread_setname_np(pthread_self(), "intune");
    current() = pool.get();
    std::unique_lock<std::mutex> lock(pool->mu_);
    --pool->waking_;
    while (true) {
      Entry entry;
      if (pool->Take(&entry)) {
        if (pool->Startable()) pool->Wake();
        lock.unlock();
        Tally tally;
        pool->Compute(&entry, &tally);
        lock.lock();
        pool->Ended(entry);
        pool->AddLocked(tally, entry.call.get());
        continue;
      }
      Waiter waiter;
      const int64_t before = pool->ended_;
      pool->idle_.push_back(&waiter);
      const bool watching = pool->Parts() > 0;
      pool->watchers_ += watching;
      const Duration patience = watching ? pool->patience_ : kIdle;
      const bool called = waiter.awake.wait_for(lock, patience, [&waiter] { return waiter.called; });
      pool->watchers_ -= watching;
      if (called) {
        --pool->waking_;
        continue;
      }
      auto& idle = pool->idle_;
      idle.erase(std::find(idle.begin(), idle.end(), &waiter));
      if (pool->Parts() == 0) {
        if (!watching) break;
      } else if (pool->ended_ == before && !pool->stalled_) {
        pool->stalled_ = true;
        pool->stalled_s_ = Seconds(CLOCK_MONOTONIC);
      }
    }
    --pool->threads_;
  }

  // Parts of running closures wait for a worker, and none of the running closures has ended for long: they may be
  // waiting for those very parts, as a parallel copy does. Until one of them ends, their parts need no room. Where that
  // turned out to be all it took, the next stall is noticed sooner.
  void Ended(const Entry& entry) {
    --*entry.counter;
    --computing_;
    if (entry.counter == &unbound_) return;
    ++ended_;
    if (!stalled_) return;
    stalled_ = false;
    if (Seconds(CLOCK_MONOTONIC) - stalled_s_ < 0.25e-3 * static_cast<double>(patience_.count())) {
      patience_ = std::max(kShortestStall, patience_ / 2);
    }
  }

  void Compute(Entry* entry, Tally* tally) {
    const Stopwatch watch(AskForCpu());
    this_call() = {this, std::move(entry->call)};
    if (entry->intra_op >= 0) {
      tensorflow::ScopedPerThreadMaxParallelism scope(entry->intra_op);
      entry->fn();
    } else {
      entry->fn();
    }
    entry->fn = nullptr;  // what it holds may be the last reference to an iterator: not under our lock
    entry->call = std::move(this_call().call);
    this_call().pool = nullptr;
    watch.Stop(tally);
  }

  void RunOnBase(Closure fn, CallPtr call) {
    elsewhere_.fetch_add(1, std::memory_order_relaxed);
    Tally tally;
    const Stopwatch watch(true);
    Current mine{this, std::move(call)};
    std::swap(this_call(), mine);  // this thread may be inside a call of another pool
    fn();
    fn = nullptr;
    std::swap(this_call(), mine);
    watch.Stop(&tally);
    elsewhere_.fetch_sub(1, std::memory_order_relaxed);
    std::unique_lock<std::mutex> lock(mu_);
    AddLocked(tally, mine.call.get());
    // By the mean: this one may be the first closure of its call or a later one, those are of all kinds.
    const int others = untimed_.exchange(0, std::memory_order_relaxed);
    tally_.closures += others;
    tally_.busy_s += others * mean_s_;
    tally_.busy_s2 += others * mean_s_ * mean_s_;
    tally_.cpu_s += others * std::min(mean_s_, mean_cpu_s_);
  }

  bool AskForCpu() {
    const int every = cpu_every_.load(std::memory_order_relaxed);
    return every <= 1 || asked_.fetch_add(1, std::memory_order_relaxed) % every == 0;
  }

  void AddLocked(const Tally& tally, Call* call) {
    const double before_s = call == nullptr ? 0.0 : call->busy_s;
    tally_.closures += tally.closures;
    tally_.busy_s += tally.busy_s;
    tally_.busy_s2 += tally.busy_s * (tally.busy_s + 2.0 * before_s);  // (a + b)^2 - a^2
    if (call != nullptr) call->busy_s += tally.busy_s;
    timed_ = std::min(timed_ + 1, kMeanOver);
    mean_s_ += (tally.busy_s - mean_s_) / timed_;
    if (tally.cpu_s >= 0.0) mean_cpu_s_ += (tally.cpu_s - mean_cpu_s_) / timed_;
    // Where it was not asked for, the closure is taken to be one like the others.
    tally_.cpu_s += tally.cpu_s >= 0.0 ? tally.cpu_s : std::min(tally.busy_s, mean_cpu_s_);
    const bool is_known = timed_ == kMeanOver;
    cpu_every_.store(is_known && mean_s_ < 0.2 * kShort_s ? 64 : is_known && mean_s_ < kShort_s ? 16 : 1,
                     std::memory_order_relaxed);
  }

  std::mutex mu_;
  std::deque<Entry> queue_, nested_, hurried_;
  std::vector<Waiter*> idle_;
  std::vector<const void*> ending_;
  std::atomic<int> limit_{0}, elsewhere_{0}, cpu_every_{1}, asked_{0}, untimed_{0};
  int drain_ = 1, threads_ = 0, waking_ = 0, watchers_ = 0;
  int running_ = 0, hurrying_ = 0, unbound_ = 0, computing_ = 0;
  int64_t ended_ = 0;
  bool stalled_ = false;
  int timed_ = 0;
  double stalled_s_ = 0.0, mean_s_ = 0.0, mean_cpu_s_ = 0.0;
  Duration patience_ = kIdle;
  Tally tally_;
};

// The runner an iterator hands to its input. Copies are cheap: tf.data copies runners with every context.
class PoolRunner {
 public:
  PoolRunner(std::shared_ptr<Pool> pool, Runner base, const void* owner, int intra_op)
      : lane_(std::make_shared<const Lane>(Lane{std::move(pool), std::move(base), owner, intra_op})) {}

  void operator()(Closure fn) const { lane_->pool->Run(std::move(fn), lane_->base, lane_->owner, lane_->intra_op); }

  static bool IsOurs(const Runner& runner) { return runner.target<PoolRunner>() != nullptr; }

  // The runner below all of ours, so that a stage without a limit does not compute on another stage's workers.
  static const Runner& Base(const Runner& runner) {
    const PoolRunner* ours = runner.target<PoolRunner>();
    return ours ? ours->lane_->base : runner;
  }

 private:
  struct Lane {
    std::shared_ptr<Pool> pool;
    Runner base;
    const void* owner;
    int intra_op;
  };
  std::shared_ptr<const Lane> lane_;
};

}  // namespace intune

#endif  // INTUNE_POOL_H_
