"""ASGI application of the admin API: middleware in its order, and routes."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI
from starlette.middleware import Middleware

from kvferry.app.api.audit import Audit, AuditTrail, audit_router
from kvferry.app.api.auth import Auth
from kvferry.app.api.context import AdminContext
from kvferry.app.api.errors import install_error_handlers
from kvferry.app.api.middleware import Bodies, RawPaths, RequestIds
from kvferry.app.api.openapi import describe
from kvferry.app.api.routes.blocks import blocks_router
from kvferry.app.api.routes.config import config_router
from kvferry.app.api.routes.events import events_router
from kvferry.app.api.routes.evictions import evictions_router
from kvferry.app.api.routes.health import health_router
from kvferry.app.api.routes.pages import PAGE_PATHS, pages_router, sign_in_page
from kvferry.app.api.routes.policies import policies_router
from kvferry.app.api.routes.requests import requests_router
from kvferry.app.api.routes.reset import reset_router
from kvferry.app.api.routes.rules import rules_router
from kvferry.app.api.routes.stats import stats_router
from kvferry.app.logs import SecretMask

ADMIN_PREFIX = "/admin/v1"


def create_app(service: AdminContext) -> FastAPI:
    """Return the admin API of a service, with `/v1` if it has an engine's router."""
    app = FastAPI(
        title="kvferry",
        version=service.version,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Outermost first. Middleware that refuses a call stands before the one that reads its body.
        middleware=[
            Middleware(RequestIds),
            Middleware(Audit, trail=AuditTrail(service.store, SecretMask.of(service.settings.current))),
            Middleware(Auth, tokens=service.tokens, page_paths=PAGE_PATHS, sign_in_page=sign_in_page),
            Middleware(Bodies, closing=service.closing),
            Middleware(RawPaths),
        ],
    )
    app.openapi = partial(describe, app, service.tokens.any_set)  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    install_error_handlers(app)
    app.include_router(health_router(service))
    app.include_router(pages_router())
    for make_router in (
        stats_router,
        reset_router,
        policies_router,
        rules_router,
        requests_router,
        blocks_router,
        evictions_router,
        config_router,
        audit_router,
        events_router,
    ):
        app.include_router(make_router(service), prefix=ADMIN_PREFIX)
    if service.engine_router is not None:
        app.include_router(service.engine_router)
    return app
