// One stage over all iterators: its numbers, which are set on the running ones, and its counters.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "gate.h"
#include "knob.h"
#include "pool.h"
#include "starter.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.pb.h"

namespace intune {

// Bytes of one element, the characters of strings included.
inline double Bytes(const std::vector<tensorflow::Tensor>& element) {
  double bytes = 0.0;
  for (const auto& tensor : element) {
    bytes += static_cast<double>(tensor.TotalBytes());
    if (tensor.dtype() != tensorflow::DT_STRING) continue;
    const auto strings = tensor.flat<tensorflow::tstring>();
    for (int64_t i = 0; i < strings.size(); ++i) {
      if (strings(i).size() > 22) bytes += static_cast<double>(strings(i).size());  // shorter ones are stored in place
    }
  }
  return bytes;
}

// Mean size of the elements looked at: the first ones and then each 16th.
class Sampled {
 public:
  static bool Wanted(int64_t number) { return number <= 4 || number % 16 == 0; }

  void Look(const std::vector<tensorflow::Tensor>& element) {
    sum_ += Bytes(element);
    ++count_;
  }
  double Mean() const { return count_ ? sum_ / static_cast<double>(count_) : 0.0; }

 private:
  double sum_ = 0.0;
  int64_t count_ = 0;
};

// tf.data's rule for `prefetch(AUTOTUNE)`: once the buffer was full, twice as large each time it is found empty.
class AutoDepth {
 public:
  // `buffered` elements were there when the next one was asked for; the depth wanted from now on.
  int64_t Asked(int64_t buffered, double item_bytes) {
    Record(buffered, item_bytes);
    if (buffered == 0) Record(1, item_bytes);
    return depth_;
  }

 private:
  static constexpr int64_t kDoubledUpTo = 2048;
  static constexpr double kMostBytes = 1e9;

  void Record(int64_t buffered, double item_bytes) {
    if (!was_full_) {
      was_full_ = buffered >= depth_;
    } else if (buffered == 0 && 2.0 * static_cast<double>(depth_) * item_bytes < kMostBytes) {
      depth_ += std::min(depth_, kDoubledUpTo);
      was_full_ = false;
    }
  }

  int64_t depth_ = 1;
  bool was_full_ = false;
};

class Stage {
 public:
  struct Reading {
    int64_t items, queued, window;
    double item_bytes;
  };

  const std::shared_ptr<Pool> pool = std::make_shared<Pool>();
  Gate gate;

  // `node` is the model's node of the iterator below, null without a model; `starter` starts its threads, null where
  // TensorFlow does. A wanted window holds for new ones too.
  void Attach(const void* iterator, std::shared_ptr<Node> node, std::shared_ptr<Starter> starter) {
    int64_t wanted;
    {
      std::unique_lock<std::mutex> lock(mu_);
      live_.push_back({iterator, node, starter});
      wanted = wanted_;
    }
    const Knob knob = Knob::Find(node.get());
    if (!knob) return;
    if (readers_ < 0) {
      if (wanted > 0) knob.Set(wanted);
      return;
    }
    const int64_t running = std::max<int64_t>(all_threads_ ? knob.High() : peak_.load(), knob.Get());
    const int64_t threads = knob.Set(starter ? std::max(running, knob.High()) : running);
    if (starter) starter->Hold(threads, running);
    std::unique_lock<std::mutex> lock(mu_);
    live_.back().threads = threads_ = threads;
    running_ = std::min(running, threads);
    most_ = knob.High();
    ended_ = false;
    Limit();
  }

  bool is_interleave() const { return readers_ >= 0; }

  // From now on the stage is an interleave: so many of its threads read at once, 0 for all it can have. More are
  // started, by us or by TensorFlow while there is input for them, and later iterators have as many as were ever
  // wanted; fewer pass the gate. The first `ahead` elements of each of its datasets may be read before their turn.
  int64_t SetReaders(int64_t wanted, int64_t ahead) {
    ahead_ = ahead;
    if (readers_ < 0) all_threads_ = wanted <= 0;
    readers_ = std::max<int64_t>(0, wanted);
    peak_ = std::max<int64_t>(peak_, readers_);
    if (readers_ > threads_ && threads_ > 0 && !ended_) {
      {
        std::unique_lock<std::mutex> lock(mu_);
        if (!live_.empty()) live_.back().threads = threads_ = std::min<int64_t>(readers_, most_);
      }
      Reassert();
    }
    Start(std::min<int64_t>(readers_, threads_));
    return Readers();
  }

  // So many threads of the interleave run from now on, if they are not more already.
  void Start(int64_t running) {
    std::list<Live> live;
    {
      std::unique_lock<std::mutex> lock(mu_);
      live = live_;
    }
    for (const Live& one : live) {
      if (one.starter) one.starter->Start(running);
    }
    running_ = std::max<int64_t>(running_, running);
    Limit();
  }

  int64_t threads() const { return threads_; }

  // The interleave has taken its last input: TensorFlow starts no more threads for it.
  void Ended() { ended_ = true; }
  bool ended() const { return ended_; }
  int64_t most() const { return most_; }
  int64_t ahead() const { return ahead_.load(std::memory_order_relaxed); }

  // Threads that may read at once, 0 while it is not known how many there are.
  int64_t Readers() const {
    const int64_t threads = threads_, readers = readers_;
    return threads > 0 && readers > 0 ? std::min(readers, threads) : std::max(threads, readers);
  }

  // The stage is a prefetch: its depth follows tf.data's rule until it is set.
  void FollowDepth() { auto_depth_ = true; }

  bool follows_depth() const { return auto_depth_.load(std::memory_order_relaxed); }

  // `node` is about to be asked for an element.
  void Asked(Node* node) {
    if (node == nullptr) return;
    const int64_t buffered = std::max<int64_t>(0, node->buffered_elements());
    std::unique_lock<std::mutex> lock(mu_);
    const int64_t depth = depth_.Asked(buffered, bytes_.Mean());
    if (depth == wanted_) return;
    wanted_ = depth;
    lock.unlock();
    if (const Knob knob = Knob::Find(node)) knob.Set(depth);
  }

  void Detach(const void* iterator) {
    std::unique_lock<std::mutex> lock(mu_);
    for (auto live = live_.begin(); live != live_.end(); ++live) {
      if (live->iterator != iterator) continue;
      if (live->node) dropped_ += live->node->buffered_elements();
      live_.erase(live);
      return;
    }
  }

  void Passed(const std::vector<tensorflow::Tensor>& element) {
    const int64_t number = passed_.fetch_add(1, std::memory_order_relaxed) + 1;
    if (!Sampled::Wanted(number)) return;
    std::unique_lock<std::mutex> lock(mu_);
    bytes_.Look(element);
  }

  void Skipped(int64_t count) { passed_ += count; }

  // Remembers the window and sets it on all iterators alive; the value in force, -1 if there is nothing to set.
  int64_t SetWindow(int64_t wanted) {
    {
      std::unique_lock<std::mutex> lock(mu_);
      wanted_ = std::max<int64_t>(1, wanted);
      auto_depth_ = false;
    }
    return Reassert();
  }

  Reading Read() {
    const int64_t window = Reassert();
    std::unique_lock<std::mutex> lock(mu_);
    Reading reading{0, 0, window, bytes_.Mean()};
    for (const Live& live : live_) {
      if (live.node) reading.queued += std::max<int64_t>(0, live.node->buffered_elements());
    }
    // Between leaving the buffer and passing here an element is in neither count.
    items_ = std::max(items_, passed_ + dropped_ + reading.queued);
    reading.items = items_;
    return reading;
  }

 private:
  struct Live {
    const void* iterator;
    std::shared_ptr<Node> node;
    std::shared_ptr<Starter> starter;
    int64_t threads = 0;  // of an interleave
  };

  void Limit() { gate.SetLimit(readers_ > 0 && readers_ < running_ ? static_cast<int>(readers_) : 0); }

  // An optimisation that tf.data had begun before the value was pinned may have overwritten it once. The nodes' locks
  // are the kernels' own: never taken while ours is held.
  int64_t Reassert() {
    std::list<Live> live;
    int64_t wanted;
    {
      std::unique_lock<std::mutex> lock(mu_);
      live = live_;
      wanted = wanted_;
    }
    int64_t window = -1;
    for (const Live& one : live) {
      const Knob knob = Knob::Find(one.node.get());
      const int64_t pinned = one.threads > 0 ? one.threads : wanted;
      if (knob) window = pinned > 0 ? knob.Set(pinned) : knob.Get();
    }
    return window;
  }

  std::mutex mu_;
  std::list<Live> live_;
  Sampled bytes_;
  AutoDepth depth_;
  std::atomic<bool> auto_depth_{false}, ended_{false}, all_threads_{false};
  std::atomic<int64_t> readers_{-1}, threads_{0}, running_{0}, peak_{0}, most_{0}, ahead_{0}, passed_{0};
  int64_t wanted_ = 0, dropped_ = 0, items_ = 0;
};

}  // namespace intune
