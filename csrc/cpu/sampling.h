// From logits to tokens: masks and penalties, filters, the draw, and the scores that requests ask to see.
#pragma once

#include "kernels.h"

namespace KERNELS {

void sample_tokens(const SampleArgs& args);
bool score_tokens(const ScoreArgs& args);
bool edit_logits(const EditArgs& args);
void apply_bitmask(float* logits, const int64_t* rows, const int32_t* words, int64_t count, int64_t vocab,
                   int64_t row_stride, int64_t word_stride);

}  // namespace KERNELS
