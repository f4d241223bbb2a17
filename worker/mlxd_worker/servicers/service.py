"""The worker's gRPC server: its three services, health and reflection on one address."""

from __future__ import annotations

import grpc

from mlxd.v1 import inference_pb2, status_pb2, worker_pb2
from mlxd_shared.security.listeners import ListenerSecurity
from mlxd_shared.serving.server import Health, add_service, make_server
from mlxd_shared.wire.proof import Proof
from mlxd_shared.wire.wire_scan import RELAYED
from mlxd_worker.front.worker import Worker
from mlxd_worker.servicers.control import ControlServicer
from mlxd_worker.servicers.inference import InferenceServicer
from mlxd_worker.servicers.metrics import WorkerMetrics
from mlxd_worker.servicers.status import StatusServicer

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    status_pb2.DESCRIPTOR.services_by_name["StatusService"],
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
)


def new_server(health: Health, security: ListenerSecurity, proof: Proof) -> grpc.aio.Server:
    """Return a server that offers the worker's services, without any of them yet.

    proof: identifies the requests that the controller has checked.
    """
    return make_server(health, SERVICES, security=security, limits=RELAYED, proof=proof)


def add_services(server: grpc.aio.Server, worker: Worker) -> None:
    """Put the worker behind the server; before it starts."""
    metrics = WorkerMetrics()
    servicers = (
        InferenceServicer(worker, metrics),
        StatusServicer(worker, metrics),
        ControlServicer(worker),
    )
    for service, servicer in zip(SERVICES, servicers, strict=True):
        add_service(server, service, servicer)
