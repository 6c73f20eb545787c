// Two tf.data operations that pass elements through unchanged, and the C functions Python drives them with.
//
// IntuneStage, right downstream of a stage, hands the stage a runner of its own: a pool whose size changes live.
// IntuneSink, outermost, counts what is delivered and how long the consumer waited for it.
//
// Neither adds itself to the iterator's prefix and neither has state to save: checkpoints of a pipeline with them and
// of the same pipeline without them can be exchanged.
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "stage_dataset.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace intune {

REGISTER_OP("IntuneStage")
    .Input("input_dataset: variant")
    .Output("handle: variant")
    .Attr("pipeline: string")
    .Attr("stage: string")
    .Attr("role: int = 0")
    .Attr("output_types: list(type) >= 1")
    .Attr("output_shapes: list(shape) >= 1")
    .SetShapeFn(shape_inference::ScalarShape);

REGISTER_OP("IntuneSink")
    .Input("input_dataset: variant")
    .Output("handle: variant")
    .Attr("pipeline: string")
    .Attr("output_types: list(type) >= 1")
    .Attr("output_shapes: list(shape) >= 1")
    .SetShapeFn(shape_inference::ScalarShape);

class SinkDataset : public PassThrough {
 public:
  SinkDataset(OpKernelContext* ctx, const DatasetBase* input, std::string pipeline)
      : PassThrough(ctx, input), pipeline_(std::move(pipeline)) {}
  std::string DebugString() const override { return "IntuneSink::Dataset"; }

 protected:
  std::unique_ptr<IteratorBase> MakeIteratorInternal(const std::string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix});
  }
  absl::Status AsGraphDefInternal(SerializationContext* ctx, DatasetGraphDefBuilder* b,
                                  ::tensorflow::Node** output) const override {
    return Serialize(ctx, b, {{kPipeline, Attr(b, pipeline_)}}, output);
  }

 private:
  class Iterator : public PassThroughIterator<SinkDataset> {
   public:
    using PassThroughIterator<SinkDataset>::PassThroughIterator;

    absl::Status Initialize(IteratorContext* ctx) override {
      sink_ = Registry::Get().Find(dataset()->pipeline_)->sink;
      sink_->Opened();
      return dataset()->input()->MakeIterator(ctx, this, prefix(), &input_);
    }

    absl::Status GetNextInternal(IteratorContext* ctx, std::vector<Tensor>* element, bool* end) override {
      const double asked_s = Seconds(CLOCK_MONOTONIC);
      const absl::Status status = input_->GetNext(ctx, element, end);
      sink_->Asked(Seconds(CLOCK_MONOTONIC) - asked_s, status.ok() && !*end ? element : nullptr);
      return status;
    }

   protected:
    absl::Status RestoreInternal(IteratorContext* ctx, IteratorStateReader* reader) override {
      return this->RestoreInput(ctx, reader, input_);
    }

   private:
    std::shared_ptr<Sink> sink_;
  };

  const std::string pipeline_;
};

class StageOp : public UnaryDatasetOpKernel {
 public:
  explicit StageOp(OpKernelConstruction* ctx) : UnaryDatasetOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kPipeline, &pipeline_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kStage, &stage_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kRole, &role_));
  }

 protected:
  void MakeDataset(OpKernelContext* ctx, DatasetBase* input, DatasetBase** output) override {
    *output = new StageDataset(ctx, input, pipeline_, stage_, role_);
  }

 private:
  std::string pipeline_, stage_;
  int64_t role_ = kBehind;
};

class SinkOp : public UnaryDatasetOpKernel {
 public:
  explicit SinkOp(OpKernelConstruction* ctx) : UnaryDatasetOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kPipeline, &pipeline_));
  }

 protected:
  void MakeDataset(OpKernelContext* ctx, DatasetBase* input, DatasetBase** output) override {
    *output = new SinkDataset(ctx, input, pipeline_);
  }

 private:
  std::string pipeline_;
};

REGISTER_KERNEL_BUILDER(Name("IntuneStage").Device(DEVICE_CPU), StageOp);
REGISTER_KERNEL_BUILDER(Name("IntuneSink").Device(DEVICE_CPU), SinkOp);

}  // namespace intune

extern "C" {

void intune_set_workers(const char* pipeline, const char* stage, int32_t workers) {
  intune::Registry::Get().Find(pipeline)->Find(stage)->pool->SetLimit(workers);
}

// The threads of an interleave that read at once, 0 for all it can have; what is in force, 0 while that is not known.
int64_t intune_set_readers(const char* pipeline, const char* stage, int64_t readers, int64_t ahead) {
  return intune::Registry::Get().Find(pipeline)->Find(stage)->SetReaders(readers, ahead);
}

void intune_follow_depth(const char* pipeline, const char* stage) {
  intune::Registry::Get().Find(pipeline)->Find(stage)->FollowDepth();
}

int64_t intune_set_window(const char* pipeline, const char* stage, int64_t window) {
  return intune::Registry::Get().Find(pipeline)->Find(stage)->SetWindow(window);
}

// Writes the names, each ended by '\n', into `names`; the size they need, the final 0 included.
int64_t intune_stages(const char* pipeline, char* names, int64_t size) {
  std::string all;
  if (const auto known = intune::Registry::Get().Known(pipeline)) {
    std::unique_lock<std::mutex> lock(known->mu);
    for (const auto& stage : known->stages) all += stage.first + "\n";
  }
  const int64_t needed = static_cast<int64_t>(all.size()) + 1;
  if (names != nullptr && size >= needed) std::memcpy(names, all.c_str(), needed);
  return needed;
}

// Fills 14 values in the order of `StageReading`; 0 if there is no such stage.
int32_t intune_read_stage(const char* pipeline, const char* stage, double* out) {
  const auto known = intune::Registry::Get().Known(pipeline);
  if (!known) return 0;
  std::shared_ptr<intune::Stage> found;
  {
    std::unique_lock<std::mutex> lock(known->mu);
    const auto at = known->stages.find(stage);
    if (at == known->stages.end()) return 0;
    found = at->second;
  }
  const auto pool = found->pool->Read();
  const auto r = found->Read();
  const double values[] = {double(r.items), pool.tally.busy_s, pool.tally.busy_s2, pool.tally.cpu_s,
                           double(pool.tally.closures), double(r.queued), double(r.window), double(pool.limit),
                           double(pool.running), r.item_bytes,
                           double(pool.waiting + found->gate.waiting()), double(found->Readers()),
                           double(found->most()), double(found->ended())};
  std::memcpy(out, values, sizeof values);
  return 1;
}

// Fills 4 values in the order of `SinkReading`; 0 if nothing is known of the pipeline.
int32_t intune_read_sink(const char* pipeline, double* out) {
  const auto known = intune::Registry::Get().Known(pipeline);
  if (!known) return 0;
  const auto r = known->sink->Read();
  const double values[] = {double(r.delivered), r.wait_s, double(r.iterators), double(r.samples)};
  std::memcpy(out, values, sizeof values);
  return 1;
}

void intune_release(const char* pipeline) { intune::Registry::Get().Release(pipeline); }

}  // extern "C"
