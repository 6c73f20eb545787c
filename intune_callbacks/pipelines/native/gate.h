// How many threads of a parallel interleave may read at once: a limit that falls and rises again.
//
// TensorFlow's own number falls for good. Its manager thread ends at the first wish for more workers that comes after
// the last input, such as the last file name, was taken (`if (cancelled_ || end_of_input_) return;` in
// parallel_interleave_dataset_op.cc), and that is a moment after the first element: three cycles of files are opened
// ahead. So the threads an iterator has are kept, and where fewer are wanted they pass here.
//
// Nobody waits for anything but another reader's one element: a place is given back when that is read, so all get
// through in the end, the more so once their iterator is cancelled.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "tensorflow/core/framework/cancellation.h"

namespace intune {

class Gate {
 public:
  // 0 lets all through.
  void SetLimit(int limit) {
    std::unique_lock<std::mutex> lock(mu_);
    limit_ = limit;
    changed_.notify_all();
  }

  int limit() const { return limit_.load(std::memory_order_relaxed); }
  int waiting() const { return waiting_.load(std::memory_order_relaxed); }

  // Takes a place if there is one.
  bool Try() {
    int inside = inside_;
    while (inside < limit_) {
      if (inside_.compare_exchange_weak(inside, inside + 1)) return true;
    }
    return false;
  }

  // Waits for a place; false if none is needed (any more), and then none was taken.
  bool Enter(tensorflow::CancellationManager* cancelled) {
    std::unique_lock<std::mutex> lock(mu_);
    ++waiting_;
    bool taken = false;
    while (limit_ > 0 && !(taken = Try()) && !(cancelled != nullptr && cancelled->IsCancelled())) {
      changed_.wait_for(lock, kPatience);
    }
    --waiting_;
    return taken;
  }

  void Leave() {
    --inside_;
    if (waiting_ == 0) return;
    std::unique_lock<std::mutex> lock(mu_);
    changed_.notify_one();
  }

 private:
  static constexpr std::chrono::milliseconds kPatience{20};  // until a cancelled iterator is noticed

  std::mutex mu_;
  std::condition_variable changed_;
  std::atomic<int> limit_{0}, inside_{0}, waiting_{0};
};

}  // namespace intune
