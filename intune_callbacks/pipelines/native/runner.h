// What gives the work of an iterator's input to the pool of its stage.
#pragma once

#include <memory>
#include <utility>

#include "pool.h"

namespace intune {

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
