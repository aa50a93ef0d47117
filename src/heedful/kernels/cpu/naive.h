#pragma once
#include "heedful_cpu.h"

namespace heedful {
void attend_naive(const heedful_attention& call);
void merge_naive(const heedful_merge& call);
}
