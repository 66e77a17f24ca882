"""Kernels for the gradients of max pooling and of a convolution's weight, over channels-last memory."""

from __future__ import annotations

from fuser.codegen import compiler
from fuser.codegen.cpp import loops
from fuser.codegen.cpp.anchor import Anchored
from fuser.codegen.cpp.anchored import C_TYPES, environment, render
from fuser.codegen.kernel import Body
from fuser.codegen.plan import KernelStep, channels_last_strides
from fuser.fused import tensor_meta


class MaxPoolGradient(Anchored):
    """`fuser::max_pool2d_gradient`."""

    def lower(self) -> None:
        lowering = self.lowering
        gradient, x, kernel, stride, padding, dilation, _ = self.fused.anchor.args
        sizes, out = tuple(tensor_meta(x).shape), tuple(tensor_meta(gradient).shape)
        values = [
            lowering.in_layout(self.outer[n], channels_last_strides(tuple(tensor_meta(n).shape))) for n in (gradient, x)
        ]
        result = lowering.buffer(None, sizes, channels_last_strides(sizes), self.meta.dtype)
        geometry = []
        for d in range(2):
            geometry += [sizes[2 + d], out[2 + d], kernel[d], stride[d], padding[d], dilation[d]]
        name = loops.symbol_of(self.fused)
        template = environment().get_template("pool_gradient.cpp.j2")
        code = template.render(name=name, real=C_TYPES[self.meta.dtype], vector_bytes=compiler.vector_bytes())
        lowering.plan.steps.append(
            KernelStep(name, code, [*values, result], [sizes[0], sizes[1], *geometry], [result], self.fused.name)
        )
        loops.define_results(lowering, self.node, [result])


def weight_source(name: str, body: Body, columns: int) -> str:
    """C++ for `name(ptrs, args, threads)`: the gradient of a convolution's weight as (1, tap and channel, column).

    ptrs: the gradient of the result, the input, then the body's stores.
    """
    return render("conv_weight.cpp.j2", name, body, columns, first_pointer=2, first_stride="(args + 14)")


class ConvWeightGradient(Anchored):
    """`fuser::conv2d_weight_gradient`."""

    def lower(self) -> None:
        lowering = self.lowering
        gradient, x, _, stride, dilation = self.fused.anchor.args
        places = [
            lowering.in_layout(self.outer[n], channels_last_strides(tuple(tensor_meta(n).shape))) for n in (gradient, x)
        ]
        columns, channels, *kernel = self.meta.shape
        images, _, out_h, out_w = tensor_meta(gradient).shape
        _, _, _, in_w = x_sizes = tensor_meta(x).shape
        step = channels * columns
        sizes = tuple(self.meta.shape)
        result = lowering.buffer(None, sizes, (1, columns, kernel[1] * step, step), self.meta.dtype)
        body, _, strides = self.body_and_strides((1, kernel[0] * kernel[1] * channels, columns), (2, 3, 1, 0), [result])
        name = loops.symbol_of(self.fused)
        arguments = [images, out_h, out_w, columns, channels, *kernel]
        arguments += [x_sizes[2] * in_w * channels, in_w * channels, channels, *stride, *dilation, *strides]
        code = weight_source(name, body, columns)
        lowering.plan.steps.append(KernelStep(name, code, [*places, result], arguments, [result], self.fused.name))
        loops.define_results(lowering, self.node, [result])
