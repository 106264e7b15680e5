"""The measured models in plain Keras: CIFAR ResNets and an MLP."""

from __future__ import annotations

from typing import Any


def resnet(depth: int) -> Any:
    """ResNet-20/32/110 for CIFAR (He et al. 2015, section 4.2), input 32x32x3, 10 classes. Not compiled."""
    import keras
    from keras import layers

    def unit(x: Any, filters: int, stride: int, *, relu: bool) -> Any:
        x = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        return layers.ReLU()(x) if relu else x

    inputs = keras.Input((32, 32, 3))
    x = unit(inputs, 16, 1, relu=True)
    for stage, filters in enumerate((16, 32, 64)):
        for block in range((depth - 2) // 6):
            stride = 2 if stage and not block else 1
            y = unit(unit(x, filters, stride, relu=True), filters, 1, relu=False)
            if stride == 2:
                x = layers.AveragePooling2D(2)(x)
                x = layers.Concatenate()([x, layers.Rescaling(0.0)(x)])  # option A: no parameters
            x = layers.ReLU()(layers.Add()([x, y]))
    outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs, name=f"resnet{depth}")


def mlp(hidden: int = 1024) -> Any:
    """784-hidden-hidden-10: 1.86 M parameters at 1,024."""
    import keras
    from keras import layers

    return keras.Sequential(
        [keras.Input((784,)), layers.Dense(hidden, "relu"), layers.Dense(hidden, "relu"), layers.Dense(10)],
        name=f"mlp{hidden}",
    )


def compiled(model: Any, **options: Any) -> Any:
    """Compile with the loss and optimizer of all figures: cross entropy, momentum 0.9."""
    import keras

    model.compile(
        optimizer=keras.optimizers.SGD(0.01, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **options,
    )
    return model
