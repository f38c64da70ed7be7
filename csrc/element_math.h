// Element arithmetic, written once for host and device: finite tests and the optimizer updates.
// Acc is float, or double for float64 parameters. Libtorch-free.
#pragma once

#include <math.h>  // not <cmath>: unqualified sqrt must have its float overload on the host too

#include <cstdint>

#include "segments.h"

namespace dynzero {

// Bits kInf / kNan of one value. x - x is NaN exactly for inf and NaN, and needs no library call.
template <typename Acc>
DYNZERO_HD int32_t nonfinite_bits(Acc x) {
  if (x - x == Acc(0)) return 0;
  return x == x ? kInf : kNan;
}

// base^exponent for a whole exponent, by squaring: one thread of each block waits for this, and the
// library's pow is several times slower.
DYNZERO_HD double whole_power(double base, double exponent) {
  double result = 1;
  for (uint64_t left = static_cast<uint64_t>(exponent); left != 0; left >>= 1) {
    if (left & 1) result *= base;
    base *= base;
  }
  return result;
}

// What every element of one row shares, computed once per chunk.
template <typename Acc>
struct StepScalars {
  Acc divisor;  // divisor * loss scale: a true division, see ops.h
  Acc inverse;  // 1 / divisor where that is exact (a power of two), else 0
  Acc clip;
  Acc lr, weight_decay, beta1, beta2, eps;
  Acc step_size;     // Adam: lr / (1 - beta1^step)
  Acc bias2_sqrt;    // Adam: sqrt(1 - beta2^step)
  Acc decay_factor;  // 1 - lr * weight_decay
  Acc one_minus_beta1, one_minus_beta2;
  bool first, nesterov, maximize, decoupled;
};

// 1 / x if x is a power of two whose inverse is finite, else 0.
template <typename Acc>
DYNZERO_HD Acc exact_inverse(Acc x) {
  int exponent;
  if (!(x > Acc(0)) || std::frexp(x, &exponent) != Acc(0.5)) return Acc(0);
  const Acc inverse = Acc(1) / x;
  return inverse - inverse == Acc(0) ? inverse : Acc(0);
}

template <typename Acc>
DYNZERO_HD StepScalars<Acc> step_scalars(int kind, const double* hyper, double step, double divisor,
                                         const double* status) {
  StepScalars<Acc> s;
  const double lr = hyper[kHyperLr], b1 = hyper[kHyperBeta1], b2 = hyper[kHyperBeta2];
  const int64_t flags = static_cast<int64_t>(hyper[kHyperFlags]);
  s.divisor = static_cast<Acc>(divisor * status[kStatusScale]);
  s.inverse = exact_inverse(s.divisor);
  s.clip = static_cast<Acc>(status[kStatusClip]);
  s.lr = static_cast<Acc>(lr);
  s.weight_decay = static_cast<Acc>(hyper[kHyperWeightDecay]);
  s.beta1 = static_cast<Acc>(b1);
  s.beta2 = static_cast<Acc>(b2);
  s.eps = static_cast<Acc>(hyper[kHyperEps]);
  s.one_minus_beta1 = static_cast<Acc>(1 - b1);
  s.one_minus_beta2 = static_cast<Acc>(1 - b2);
  s.decay_factor = static_cast<Acc>(1 - lr * hyper[kHyperWeightDecay]);
  s.first = step == 1;
  s.nesterov = flags & kNesterov;
  s.maximize = flags & kMaximize;
  s.decoupled = flags & kDecoupledDecay;
  s.step_size = s.lr;
  s.bias2_sqrt = Acc(1);
  if (kind == kAdam) {
    s.step_size = static_cast<Acc>(lr / (1 - whole_power(b1, step)));
    s.bias2_sqrt = static_cast<Acc>(std::sqrt(1 - whole_power(b2, step)));
  }
  return s;
}

// x / y and sqrt(x), bit for bit. On a GPU both leave their fast path when x is 0, which is common:
// gradients that underflowed, moments of weights that were never used.
template <typename Acc>
DYNZERO_HD Acc quotient(Acc x, Acc y) {
#if defined(__CUDA_ARCH__)
  const bool zero = x == Acc(0) && y > Acc(0);
  const Acc result = (zero ? y : x) / y;
  return zero ? x : result;
#else
  return x / y;
#endif
}

template <typename Acc>
DYNZERO_HD Acc root(Acc x) {
  // std::sqrt, because the C function would work in double on the host.
#if defined(__CUDA_ARCH__)
  const bool zero = x == Acc(0);
  const Acc result = std::sqrt(zero ? Acc(1) : x);
  return zero ? x : result;
#else
  return std::sqrt(x);
#endif
}

// Loss scales and most world sizes are powers of two, where multiplying gives the same bits as the
// division and costs a tenth of it.
template <typename Acc>
DYNZERO_HD Acc unscaled_grad(const StepScalars<Acc>& s, Acc raw) {
  const Acc g = (s.inverse != Acc(0) ? raw * s.inverse : quotient(raw, s.divisor)) * s.clip;
  return s.maximize ? -g : g;
}

// torch.optim.AdamW (decoupled) and torch.optim.Adam, single-tensor formulas.
template <typename Acc>
DYNZERO_HD Acc adam_update(const StepScalars<Acc>& s, Acc g, Acc p, Acc& exp_avg, Acc& exp_avg_sq) {
  if (s.decoupled) {
    p *= s.decay_factor;
  } else if (s.weight_decay != Acc(0)) {
    g += s.weight_decay * p;
  }
  exp_avg += s.one_minus_beta1 * (g - exp_avg);
  exp_avg_sq = s.beta2 * exp_avg_sq + s.one_minus_beta2 * g * g;
  const Acc denom = quotient(root(exp_avg_sq), s.bias2_sqrt) + s.eps;
  return p - s.step_size * quotient(exp_avg, denom);
}

// torch.optim.SGD. With momentum 0 the buffer is not used.
template <typename Acc>
DYNZERO_HD Acc sgd_update(const StepScalars<Acc>& s, Acc g, Acc p, Acc& buffer) {
  if (s.weight_decay != Acc(0)) g += s.weight_decay * p;  // as torch: 0 * inf would be NaN
  if (s.beta1 != Acc(0)) {
    buffer = s.first ? g : s.beta1 * buffer + s.one_minus_beta2 * g;
    g = s.nesterov ? g + s.beta1 * buffer : buffer;
  }
  return p - s.lr * g;
}

// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2).
template <typename Acc>
DYNZERO_HD Acc lion_update(const StepScalars<Acc>& s, Acc g, Acc p, Acc& exp_avg) {
  const Acc c = s.beta1 * exp_avg + s.one_minus_beta1 * g;
  const Acc sign = Acc(c > Acc(0)) - Acc(c < Acc(0));
  exp_avg = s.beta2 * exp_avg + s.one_minus_beta2 * g;
  return p * s.decay_factor - s.lr * sign;
}

}  // namespace dynzero
