"""Small models with the structure of known ones, for the table of routes: what neither types nor accessors identify."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

Linear, Conv, Embedding = nn.Linear, nn.Conv2d, nn.Embedding


class Tree(nn.Module):
    """A module with the given children, parameters and attributes."""

    def __init__(self, **children: Any) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def _mlp(*sizes: int) -> nn.Sequential:
    layers = [(Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain.from_iterable(layers))[:-1]


def _blocks(width: int = 64) -> nn.ModuleList:
    return nn.ModuleList(Tree(up=Linear(width, 4 * width), down=Linear(4 * width, width)) for _ in range(2))


def _graph_layer(inputs: int, outputs: int) -> Tree:
    return Tree(weight=_parameter(inputs, outputs), in_features=inputs, out_features=outputs)


def _dense(inputs: int, outputs: int) -> Tree:
    return Tree(kernel=_parameter(inputs, outputs), bias=_parameter(outputs))


def _conv(inputs: int, outputs: int, size: int = 3) -> Tree:
    return Tree(conv=Conv(inputs, outputs, size, bias=False), bn=nn.BatchNorm2d(outputs))


def _towers(hidden: int, outputs: int, *widths: int) -> nn.ModuleList:
    return nn.ModuleList(
        nn.Sequential(_conv(width, hidden), _conv(hidden, hidden), Conv(hidden, outputs, 1))
        for width in widths
    )


def _yolo(classes: int) -> nn.Sequential:
    detect = Tree(
        cv2=_towers(64, 64, 64, 128),
        cv3=_towers(80, classes, 64, 128),
        dfl=Tree(conv=Conv(16, 1, 1, bias=False)),
    )
    return nn.Sequential(_conv(3, 64), _conv(64, 128), detect)


def _detection(width: int) -> Tree:
    return Tree(m=nn.ModuleList([Conv(width, 255, 1), Conv(width, 255, 1)]))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "readme": lambda: nn.Sequential(Embedding(256, 64), Linear(64, 64), nn.GELU(), Linear(64, 256)),
    "cnn": lambda: Tree(
        conv_layers=nn.Sequential(Conv(3, 32, 3), nn.ReLU(), Conv(32, 64, 3)), fc_layers=_mlp(256, 128, 10)
    ),
    "vgg": lambda: Tree(features=nn.Sequential(Conv(3, 64, 3)), classifier=_mlp(576, 512, 512, 10)),
    "autoencoder": lambda: Tree(encoder=_mlp(784, 256, 32), decoder=_mlp(32, 256, 784)),
    "vae": lambda: Tree(
        fc1=Linear(784, 400),
        fc21=Linear(400, 20),
        fc22=Linear(400, 20),
        fc3=Linear(20, 400),
        fc4=Linear(400, 784),
    ),
    "actor_critic": lambda: Tree(critic=_mlp(376, 64, 64, 1), actor_mean=_mlp(376, 64, 64, 17)),
    "actor_critic_widths": lambda: Tree(actor=_mlp(376, 256, 17), critic=_mlp(376, 512, 2)),
    "sac": lambda: Tree(
        fc1=Linear(376, 256), fc2=Linear(256, 256), fc_mean=Linear(256, 17), fc_logstd=Linear(256, 17)
    ),
    "twin_q": lambda: Tree(
        l1=Linear(23, 256),
        l2=Linear(256, 256),
        l3=Linear(256, 2),
        l4=Linear(23, 256),
        l5=Linear(256, 256),
        l6=Linear(256, 2),
    ),
    "tasks": lambda: Tree(
        trunk=_mlp(100, 256, 256), tasks=nn.ModuleDict({"age": _mlp(256, 64, 50), "sex": _mlp(256, 64, 2)})
    ),
    "auxiliary": lambda: Tree(trunk=_mlp(512, 256, 256), head=Linear(256, 100), aux_head=Linear(256, 4)),
    "flow_policy": lambda: Tree(
        layers=_blocks(256),
        action_in_proj=Linear(32, 256),
        action_out_proj=Linear(256, 32),
        time_in=Linear(512, 256),
        time_out=Linear(256, 256),
    ),
    "gcn": lambda: Tree(gc1=_graph_layer(1433, 16), gc2=_graph_layer(16, 7)),
    "sage": lambda: Tree(
        convs=nn.ModuleList(
            Tree(lin_l=Linear(*sizes), lin_r=Linear(*sizes)) for sizes in ((100, 256), (256, 256), (256, 47))
        )
    ),
    "gat": lambda: Tree(
        attention=Tree(W=_parameter(1433, 8), a=_parameter(16, 1), in_features=1433, out_features=8),
        out=Linear(8, 7),
    ),
    "flax": lambda: Tree(Dense_0=_dense(784, 256), Dense_1=_dense(256, 10)),
    "super_resolution": lambda: Tree(conv1=Conv(1, 64, 5), conv2=Conv(64, 32, 3), conv3=Conv(32, 9, 3)),
    "detector": lambda: Tree(model=nn.ModuleList([Conv(3, 16, 6), Conv(16, 32, 3), _detection(32)])),
    "weight_norm": lambda: Tree(
        stem=parametrizations.weight_norm(Conv(3, 16, 1)),
        body=parametrizations.spectral_norm(Conv(16, 16, 3)),
        fc=Linear(16, 9),
    ),
    "vit_pytorch": lambda: Tree(
        to_patch_embedding=nn.Sequential(nn.LayerNorm(48), Linear(48, 64)),
        layers=_blocks(),
        mlp_head=Linear(64, 10),
    ),
    "characters": lambda: Tree(
        characters=Embedding(65, 256),
        positions=Embedding(1024, 256),
        up=Linear(256, 1024),
        down=Linear(1024, 256),
        out=Linear(256, 65),
    ),
    "bytes": lambda: Tree(tokens=Embedding(256, 256), layers=_blocks(256), readout=Linear(256, 256)),
    "chess": lambda: Tree(
        pieces=Embedding(13, 64), layers=_blocks(), policy=Linear(64, 1858), value=Linear(64, 3)
    ),
    "two_vocabularies": lambda: Tree(
        source=Embedding(8000, 64),
        target=Embedding(6000, 64),
        positions=Embedding(512, 64),
        encoder=_blocks(),
        decoder=_blocks(),
        out=Linear(64, 6000),
    ),
    "tied_table": lambda: Tree(table=_parameter(5000, 64), layers=_blocks()),
    "codebook": lambda: Tree(
        encode=_mlp(784, 256, 64), codebook=_parameter(512, 64), decode=_mlp(64, 256, 784)
    ),
    "prototypes": lambda: Tree(prototypes=_parameter(100, 32), backbone=_mlp(512, 256, 32)),
    "hidden_fc": lambda: Tree(conv=Conv(3, 32, 3), fc=Linear(512, 128), head=Linear(128, 10)),
    "gan": lambda: Tree(
        generator=Tree(body=_mlp(128, 256, 256), to_rgb=Conv(256, 3, 1)),
        discriminator=Tree(from_rgb=Conv(3, 64, 1), body=Conv(64, 128, 3), out=Linear(128, 2)),
    ),
    "postnet": lambda: Tree(
        decoder=_blocks(), feat_out=Linear(64, 80), postnet=nn.Sequential(Conv(80, 256, 5), Conv(256, 80, 5))
    ),
    "bare_tables": lambda: Tree(
        vocab_weight=_parameter(1000, 64),
        W_E=_parameter(1000, 64),
        blocks=_blocks(),
        W_U=_parameter(64, 1000),
    ),
    "dlrm": lambda: Tree(
        tables=nn.ModuleList([nn.EmbeddingBag(1000, 64)]), bottom=_mlp(13, 256, 64), top=_mlp(367, 256, 1)
    ),
    "yolo": lambda: _yolo(20),
    "yolo_square": lambda: _yolo(80),
    "chess_convolutions": lambda: Tree(
        stem=Conv(18, 64, 3),
        tower=nn.Sequential(*(Tree(conv1=Conv(64, 64, 3), conv2=Conv(64, 64, 3)) for _ in range(2))),
        policy=nn.Sequential(Conv(64, 32, 1), nn.ReLU(), Conv(32, 73, 1)),
        value=nn.Sequential(Conv(64, 8, 1), nn.Flatten(), Linear(512, 64), Linear(64, 3)),
    ),
    "go": lambda: Tree(
        conv_input=Conv(17, 64, 3),
        policy_conv=Conv(64, 2, 1),
        policy_fc=Linear(722, 362),
        value_conv=Conv(64, 4, 1),
        value_fc1=Linear(1444, 64),
        value_fc2=Linear(64, 3),
    ),
    "detector_beside_stems": lambda: Tree(
        body=nn.Sequential(Conv(3, 64, 3), Conv(64, 128, 3), Conv(128, 256, 3)),
        preds=nn.ModuleList(Conv(64, 20, 1) for _ in range(2)),
        stems=nn.ModuleList(_conv(width, 64, 1) for width in (128, 256)),
    ),
    "mlp_gan": lambda: Tree(
        generator=Tree(model=_mlp(100, 128, 256, 784)), discriminator=Tree(model=_mlp(784, 512, 256, 1))
    ),
    "narrow_gan": lambda: Tree(generator=_mlp(128, 256, 256, 45), discriminator=_mlp(45, 256, 256, 1)),
    "actor_on_trunk": lambda: Tree(trunk=_mlp(60, 128, 80), actor=Linear(80, 6), critic=Linear(80, 1)),
    "denoiser": lambda: Tree(
        down=nn.ModuleList([Tree(first=Conv(7, 64, 5), second=Conv(64, 64, 5), residual=Conv(7, 64, 1))]),
        up=nn.ModuleList([Tree(first=Conv(128, 64, 5), second=Conv(64, 64, 5), residual=Conv(128, 64, 1))]),
        final=nn.Sequential(Conv(64, 64, 5), Conv(64, 7, 1)),
    ),
    "vq": lambda: Tree(
        encoder=Tree(conv_in=Conv(3, 64, 3), hidden=Conv(64, 128, 3), conv_out=Conv(128, 32, 3)),
        quantize=Tree(embedding=Embedding(512, 32)),
        decoder=Tree(conv_in=Conv(32, 128, 3), hidden=Conv(128, 64, 3), conv_out=Conv(64, 3, 3)),
    ),
    "forecast": lambda: Tree(encoder=Linear(96, 512), layers=_blocks(512), out=Linear(512, 96)),
    "keypoints": lambda: Tree(
        conv1=Conv(1, 64, 3), hidden=Conv(64, 128, 3), points=Conv(128, 65, 1), descriptor=Conv(128, 128, 1)
    ),
    # The decoder reads an embedding beside what the encoder makes.
    "recogniser": lambda: Tree(
        lower=nn.LSTM(80, 256, bidirectional=True),
        upper=nn.LSTM(512, 128),
        tokens=Embedding(1000, 64),
        decoder=nn.GRU(192, 128),
        out=Linear(128, 1000),
    ),
}
