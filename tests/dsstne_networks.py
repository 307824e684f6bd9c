"""Networks of DSSTNE: its CIFAR sample, and files written by netCDF4, the library with which
DSSTNE reads them.
"""

import netCDF4
import numpy as np
import scipy.sparse
from flax import nnx

from sparsejax.dsstne.definition import Definition
from sparsejax.dsstne.network import Network
from sparsejax.sparse import CSR


def _typed(to, /, **values):
    return {name: to(value) for name, value in values.items()}


NETWORK = (
    {"name": "tiny", "checkpoint_name": "checkpoint"}
    | _typed(np.uint32, kind=0, errorFunction=2, ShuffleIndices=1)
    | _typed(np.uint32, bSparsenessPenalty=0, bDenoising=0)
    | _typed(np.int32, maxout_k=2, LRN_n=5)
    | _typed(np.int32, checkpoint_interval=0, checkpoint_epochs=0)
    | _typed(np.float32, version=0.9, decay=0, denoising_p=0)
    | _typed(np.float32, LRN_k=2, LRN_alpha=1e-4, LRN_beta=0.75)
    | _typed(np.float32, sparsenessPenalty_p=0, sparsenessPenalty_beta=0)
    | _typed(np.float32, deltaBoost_one=1, deltaBoost_zero=1)
    | _typed(np.float32, SMCE_oneScale=1, SMCE_zeroScale=1)
    | _typed(np.float32, SMCE_oneTarget=0.9, SMCE_zeroTarget=0.1)
)
LAYER = (
    {"dataSet": ""}
    | _typed(np.uint32, type=0, poolingfunction=0, activation=0, weightInit=0)
    | _typed(np.uint32, attributes=0, sources=0, skips=0)
    | _typed(np.uint32, Ny=1, Nz=1, Nw=1, dimensions=1, kernelDimensions=1)
    | _typed(np.uint32, kernelX=1, kernelY=1, kernelZ=1)
    | _typed(np.uint32, kernelStrideX=1, kernelStrideY=1, kernelStrideZ=1)
    | _typed(np.uint32, kernelPaddingX=0, kernelPaddingY=0, kernelPaddingZ=0)
    | _typed(np.float32, pDropout=0, weightInitScale=1, biasInit=0)
    | _typed(np.float32, weightNorm=0, deltaNorm=0)
    | _typed(np.float32, sparsenessPenalty_p=0, sparsenessPenalty_beta=0)
    | _typed(np.float32, RELUSlope=1, ELUAlpha=1, SELULambda=1.050701)
)


def write(path, layers, weights, **network):
    """Writes a file with layers `{attribute: value}` and weights `(from, to, weights, bias)`."""
    with netCDF4.Dataset(path, "w") as file:
        counts = {"layers": np.uint32(len(layers)), "weights": np.uint32(len(weights))}
        file.setncatts({**NETWORK, **counts, **network})
        for i, layer in enumerate(layers):
            for name, value in {**LAYER, **layer}.items():
                file.setncattr(f"layer{i}_{name}", value)
        for i, (source, layer, array, bias) in enumerate(weights):
            array, bias = np.asarray(array, "f4"), np.asarray(bias, "f4")
            sizes = {"width": array.shape[1], "height": array.shape[0]}
            for name in ("width", "height", "length", "depth", "breadth"):
                file.setncattr(f"weight{i}_{name}", np.uint64(sizes.get(name, 1)))
            file.setncattr(f"weight{i}_inputLayer", source)
            file.setncattr(f"weight{i}_outputLayer", layer)
            file.setncattr(f"weight{i}_bShared", np.uint32(0))
            for name, values in (("bias", bias), ("weights", array.ravel())):
                dimension = f"weight{i}_{'biasDim' if name == 'bias' else 'weightDim'}"
                file.createDimension(dimension, len(values))
                variable = file.createVariable(f"weight{i}_{name}", "f4", (dimension,))
                variable[:] = values
    return path


def tiny(path, **network):
    """Writes a network of sigmoid units with layers of 4, 2 and 3."""
    layers = [
        {
            "name": "Input",
            "kind": np.uint32(0),
            "Nx": np.uint32(4),
            "dataSet": "gl_input",
            "attributes": np.uint32(1),
        },
        {
            "name": "Hidden",
            "kind": np.uint32(1),
            "Nx": np.uint32(2),
            "sources": np.uint32(1),
            "source0": "Input",
        },
        {
            "name": "Output",
            "kind": np.uint32(2),
            "Nx": np.uint32(3),
            "dataSet": "gl_output",
            "attributes": np.uint32(1),
            "sources": np.uint32(1),
            "source0": "Hidden",
        },
    ]
    weights = [
        ("Input", "Hidden", [[1, 0], [0, 1], [1, 1], [-1, 0]], [0, 0]),
        ("Hidden", "Output", [[2, 0, -2], [0, 2, -2]], [-1, -1, 1]),
    ]
    return write(path, layers, weights, **network)


def conv(name, n, width):
    return {
        "Name": name,
        "Kind": "Hidden",
        "Type": "Convolutional",
        "N": n,
        "Kernel": [width, width],
        "KernelStride": [1, 1],
        "Activation": "Linear",
        "WeightInit": {"Scheme": "Gaussian", "Scale": 0.02, "Bias": 0.0},
    }


def pool(name, width):
    return {
        "Name": name,
        "Kind": "Hidden",
        "Type": "Pooling",
        "Function": "Max",
        "Kernel": [width, width],
        "KernelStride": [2, 2],
    }


CIFAR = {
    "Version": 0.81,
    "Layers": [
        {"Name": "Input", "Type": "Convolutional", "N": "auto", "DataSet": "input"},
        conv("C1", 128, 7),
        conv("C1a", 128, 7),
        pool("P1", 4),
        conv("C2", 128, 7),
        conv("C2a", 128, 7),
        pool("P2", 4),
        conv("C3", 96, 5),
        conv("C3a", 96, 5),
        pool("P3", 2),
        {"Kind": "Hidden", "N": 1024, "Activation": "Relu", "pDropout": 0.5},
        {"Name": "Output", "N": "auto", "DataSet": "output", "Activation": "SoftMax"},
    ],
    "ErrorFunction": "CrossEntropy",
}


def made(*layers, parameters=None, **keys):
    """The network with these layers; `keys` are keys of its JSON."""
    definition = Definition.from_json({"Layers": list(layers), **keys})
    rngs = nnx.Rngs(params=0, dropout=1)
    return Network(definition, parameters=parameters, rngs=rngs)


def rows(*texts):
    """A batch with these dense rows."""
    return CSR.from_scipy(scipy.sparse.csr_array(np.array(texts)))
