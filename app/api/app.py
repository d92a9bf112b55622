"""The ASGI application: middleware in its order, then the routes."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI
from starlette.middleware import Middleware

from kvferry.app.api.audit import audit_router
from kvferry.app.api.audit_trail import Audit, AuditTrail
from kvferry.app.api.auth import Auth
from kvferry.app.api.blocks import blocks_router
from kvferry.app.api.bodies import Bodies
from kvferry.app.api.config import config_router
from kvferry.app.api.context import AdminContext
from kvferry.app.api.envelope import Envelope
from kvferry.app.api.events import events_router
from kvferry.app.api.evictions import evictions_router
from kvferry.app.api.health import health_router
from kvferry.app.api.offthread import StoreThreads
from kvferry.app.api.openapi import describe
from kvferry.app.api.overrides import overrides_router
from kvferry.app.api.pages import pages_router
from kvferry.app.api.policy import policy_router
from kvferry.app.api.problems import install_problem_handlers
from kvferry.app.api.raw_ids import RawIds
from kvferry.app.api.requests import requests_router
from kvferry.app.api.reset import reset_router
from kvferry.app.api.rules import rules_router
from kvferry.app.api.stats import stats_router
from kvferry.app.masking import SecretMask

ADMIN_PREFIX = "/admin/v1"


def create_app(service: AdminContext) -> FastAPI:
    """The admin API over this service, and `/v1` where it has an engine's router."""
    app = FastAPI(
        title="kvferry",
        version=service.version,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # The first sees a call first. What refuses a call stands before what reads its body.
        middleware=[
            Middleware(Envelope),
            Middleware(Audit, trail=AuditTrail(service.store, SecretMask.of(service.settings.current))),
            Middleware(Auth, tokens=service.tokens),
            Middleware(Bodies, closing=service.closing),
            Middleware(RawIds),
        ],
    )
    app.openapi = partial(describe, app, service.tokens.any_set)  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    install_problem_handlers(app)
    threads = StoreThreads()
    app.include_router(health_router(service))
    app.include_router(pages_router())
    for router in (
        stats_router(service),
        reset_router(service),
        policy_router(service),
        overrides_router(service, threads),
        rules_router(service, threads),
        requests_router(service),
        blocks_router(service),
        evictions_router(service, threads),
        config_router(service),
        audit_router(service, threads),
        events_router(service),
    ):
        app.include_router(router, prefix=ADMIN_PREFIX)
    if service.engine_router is not None:
        app.include_router(service.engine_router)
    return app
