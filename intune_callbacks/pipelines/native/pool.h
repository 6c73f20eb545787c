// The resizable pool of one tf.data stage: at most `limit` closures compute at once, and the limit changes live.
//
// A closure is never dropped: tf.data iterators wait in their destructor for every closure they have scheduled, so a
// pool that forgot one would hang the program. Threads hold the pool, not the other way round; one that has had
// nothing to do for `kIdle` ends, so a released pool frees itself and nothing is joined at process exit.
#pragma once

#include <pthread.h>

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

#include "tally.h"
#include "tensorflow/core/platform/denormal.h"
#include "tensorflow/core/platform/setround.h"
#include "tensorflow/core/util/work_sharder.h"

namespace intune {

using Closure = std::function<void()>;
using Runner = std::function<void(Closure)>;

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
        const bool nested = current_ == this, hurried = Hurried(owner);
        (hurried ? hurried_ : nested ? nested_ : queue_).push_back({std::move(fn), std::move(call), owner, intra_op});
        if (Startable()) Wake();
        return;
      }
    }
    if (!call && !costs_.Wanted()) {
      costs_.Untimed();
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
    costs_.Add(tally);
  }

  Counters Read() {
    std::unique_lock<std::mutex> lock(mu_);
    const size_t waiting = queue_.size() + nested_.size() + hurried_.size();
    return {costs_.tally(), limit_, computing_ + elsewhere_, static_cast<int>(waiting), threads_};
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
  inline static const int kHurried = std::max(16, static_cast<int>(std::thread::hardware_concurrency()));

  inline static thread_local Pool* current_ = nullptr;

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
    room += std::max(0, std::min(hurried, kHurried - hurrying_));
    return (stalled_ ? std::max(room, Parts()) : room) > waking_;
  }

  bool Take(Entry* entry) {
    const bool room = running_ < Limit(), hurried_room = hurrying_ < kHurried;
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
    current_ = pool.get();
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
        pool->costs_.Add(tally, entry.call.get());
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
    const Stopwatch watch(costs_.Wanted());
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
    costs_.Add(tally, mine.call.get());
    costs_.AddUntimed();
  }

  std::mutex mu_;
  std::deque<Entry> queue_, nested_, hurried_;
  std::vector<Waiter*> idle_;
  std::vector<const void*> ending_;
  std::atomic<int> limit_{0}, elsewhere_{0};
  int drain_ = 1, threads_ = 0, waking_ = 0, watchers_ = 0;
  int running_ = 0, hurrying_ = 0, unbound_ = 0, computing_ = 0;
  int64_t ended_ = 0;
  bool stalled_ = false;
  double stalled_s_ = 0.0;
  Duration patience_ = kIdle;
  Costs costs_;
};

}  // namespace intune
