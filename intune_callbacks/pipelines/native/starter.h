// Threads of a parallel interleave that are started later, once more of them are wanted.
//
// TensorFlow starts them through a thread pool that comes with the context, and none any more a moment after the first
// element, see `gate.h`. So the interleave is told of all the threads it can have, and those beyond the wanted number
// stand here before their first line. They cost nothing, and no element passes a gate because of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tensorflow/core/platform/threadpool_interface.h"

namespace intune {

class Starter : public tensorflow::thread::ThreadPoolInterface, public std::enable_shared_from_this<Starter> {
 public:
  explicit Starter(tensorflow::thread::ThreadPoolInterface* base) : base_(base) {}

  // The pool below all of these. What an interleave reads from has threads of its own, as another interleave has, and
  // may schedule them first: they are none of this one's.
  static tensorflow::thread::ThreadPoolInterface* Base(tensorflow::thread::ThreadPoolInterface* pool) {
    while (const auto* ours = dynamic_cast<const Starter*>(pool)) pool = ours->base_;
    return pool;
  }

  // Before the first element is asked for: of the interleave's `threads` so many run, the others wait for `Start`.
  void Hold(int64_t threads, int64_t running) {
    std::unique_lock<std::mutex> lock(mu_);
    threads_ = threads;
    running_ = running;
  }

  // So many run from now on, if they are not more already.
  void Start(int64_t running = std::numeric_limits<int64_t>::max()) {
    std::vector<std::function<void()>> starting;
    {
      std::unique_lock<std::mutex> lock(mu_);
      running_ = std::max(running_, running);
      while (!held_.empty() && started_ < running_) {
        starting.push_back(std::move(held_.back()));
        held_.pop_back();
        ++started_;
      }
    }
    for (auto& thread : starting) base_->Schedule(std::move(thread));
  }

  // The first to be scheduled is the thread that schedules the others: those that read, and then, and from then on,
  // those that open files ahead. What the datasets of its function schedule comes from other threads.
  void Schedule(std::function<void()> fn) override {
    {
      std::unique_lock<std::mutex> lock(mu_);
      if (threads_ > 0 && !is_begun_) {
        is_begun_ = true;
        // The iterator may be gone before this thread's last line.
        fn = [self = shared_from_this(), fn = std::move(fn)] {
          self->SetManager(std::this_thread::get_id());
          fn();
          self->SetManager(std::thread::id());
        };
      } else if (std::this_thread::get_id() == manager_ && scheduled_ < threads_) {
        ++scheduled_;
        if (started_ >= running_) {
          held_.push_back(std::move(fn));
          return;
        }
        ++started_;
      }
    }
    base_->Schedule(std::move(fn));
  }

  int NumThreads() const override { return base_->NumThreads(); }
  int CurrentThreadId() const override { return base_->CurrentThreadId(); }

 private:
  void SetManager(std::thread::id id) {
    std::unique_lock<std::mutex> lock(mu_);
    manager_ = id;
  }

  tensorflow::thread::ThreadPoolInterface* const base_;
  std::mutex mu_;
  std::vector<std::function<void()>> held_;
  std::thread::id manager_;
  bool is_begun_ = false;
  int64_t threads_ = 0, running_ = 0, scheduled_ = 0, started_ = 0;
};

}  // namespace intune
