"""ASGI application of the admin API: middleware in its order, and routes."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI
from starlette.middleware import Middleware

from kvferry import __version__
from kvferry.app.api.audit import Audit, LoggedOnly, audit_router
from kvferry.app.api.auth import Auth, Tokens
from kvferry.app.api.calls import Bodies, RawPaths, RequestIds
from kvferry.app.api.context import AdminContext
from kvferry.app.api.errors import install_error_handlers
from kvferry.app.api.openapi import add_heads, describe
from kvferry.app.api.routes.blocks import blocks_router
from kvferry.app.api.routes.config import config_router
from kvferry.app.api.routes.events import events_router
from kvferry.app.api.routes.evictions import evictions_router
from kvferry.app.api.routes.exports import exports_router
from kvferry.app.api.routes.fleet import fleet_router
from kvferry.app.api.routes.health import health_router
from kvferry.app.api.routes.lookup import lookup_router
from kvferry.app.api.routes.pages import PAGE_PATHS, pages_router, sign_in_page, static_paths
from kvferry.app.api.routes.policies import policies_router
from kvferry.app.api.routes.requests import requests_router
from kvferry.app.api.routes.reset import reset_router
from kvferry.app.api.routes.rules import rules_router
from kvferry.app.api.routes.stats import stats_router
from kvferry.app.api.routes.tenants import tenants_router
from kvferry.app.api.routes.tiers import tiers_router
from kvferry.app.api.routes.what_if import what_if_router
from kvferry.app.logs import SecretMask
from kvferry.app.store import StoreThreads


def create_app(context: AdminContext) -> FastAPI:
    """Return the admin API of a service, with `/v1` if it has an engine's router."""
    settings, threads = context.settings.current, StoreThreads()
    logged_only = LoggedOnly()
    tokens = Tokens.of(settings)
    app = FastAPI(
        title="kvferry",
        version=__version__,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Outermost first. Middleware that refuses a call stands before the one that reads its body.
        middleware=[
            Middleware(RequestIds),
            Middleware(
                Audit, store=context.store, threads=threads, mask=SecretMask.of(settings), logged_only=logged_only
            ),
            Middleware(
                Auth, tokens=tokens, page_paths=PAGE_PATHS, static_paths=static_paths(), sign_in_page=sign_in_page
            ),
            Middleware(Bodies, closing=context.process.closing),
            Middleware(RawPaths),
        ],
    )
    app.openapi = partial(describe, app, tokens.any_set, lambda: context.cache.scheduler.tiers.names)  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    install_error_handlers(app)
    for router in (
        add_heads(health_router(context, __version__)),
        add_heads(pages_router()),
        stats_router(context),
        what_if_router(context.process.what_if, context.process.auto),
        reset_router(context, threads),
        policies_router(context),
        rules_router(context),
        requests_router(context),
        blocks_router(context, threads),
        lookup_router(context),
        tenants_router(context),
        tiers_router(context),
        exports_router(context.exports, settings),
        evictions_router(context.store, threads),
        fleet_router(context.store, threads),
        config_router(context.settings, context.feed),
        audit_router(context.store, threads, logged_only),
        events_router(context.feed, context.cache.scheduler, context.process.closing),
    ):
        app.routes.extend(router.routes)
    if context.engine_router is not None:
        app.routes.extend(context.engine_router.routes)
    return app
