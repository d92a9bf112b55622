"""ASGI application of the admin API: middleware in its order, and routes."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware import Middleware

from kvferry import __version__
from kvferry.app.api.audit import Audit, LoggedOnly
from kvferry.app.api.auth import Auth, Tokens
from kvferry.app.api.calls import Bodies, EngineCalls, RawPaths, RequestIds
from kvferry.app.api.context import AdminContext
from kvferry.app.api.errors import install_error_handlers
from kvferry.app.api.openapi import DESCRIPTION, TAGS, Document, add_heads
from kvferry.app.api.routes import (
    audit,
    blocks,
    breaks,
    config,
    events,
    evictions,
    health,
    lookup,
    pages,
    policies,
    requests,
    reset,
    rules,
    sessions,
    stats,
    tenants,
    tiers,
    what_if,
)
from kvferry.app.api.sse import Streams

_ROUTERS = (
    add_heads(health.router),
    add_heads(pages.router),
    stats.router,
    what_if.router,
    breaks.router,
    reset.router,
    policies.router,
    rules.router,
    requests.router,
    sessions.router,
    blocks.router,
    lookup.router,
    tenants.router,
    tiers.router,
    evictions.router,
    config.router,
    audit.router,
    events.router,
)
"""Made once, for all services of the process: what routes need of one is in the state of its app."""


def create_app(context: AdminContext) -> FastAPI:
    """Return the admin API of a service, with `/v1` if it has an engine's router."""
    settings = context.settings.current
    logged_only = LoggedOnly()
    tokens = Tokens(context.settings)
    app = FastAPI(
        title="kvferry",
        version=__version__,
        description=DESCRIPTION,
        openapi_tags=TAGS,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Outermost first. Middleware that refuses a call stands before the one that reads its body.
        middleware=[
            Middleware(RequestIds),
            Middleware(Audit, store=context.store, settings=context.settings, logged_only=logged_only),
            Middleware(
                Auth,
                tokens=tokens,
                page_paths=pages.PAGE_PATHS,
                ui_path=pages.UI,
                sign_in_page=pages.sign_in_page,
            ),
            Middleware(EngineCalls, max_running=settings.max_running, max_waiting=settings.max_waiting),
            Middleware(Bodies, closing=context.closing),
            Middleware(RawPaths),
        ],
    )
    install_error_handlers(app)
    app.state.context = context
    app.state.openapi = Document(app, tokens.any_set, lambda: context.scheduler.tiers.names)
    app.state.logged_only = logged_only
    app.state.probes = health.Probes(context)
    app.state.searches = reset.Searches()
    app.state.query_threads = lookup.QueryThreads()
    app.state.stats_streams = Streams(context.closing, tokens.is_valid, stats.MAX_STREAMS)
    app.state.event_streams = Streams(context.closing, tokens.is_valid, events.MAX_WATCHERS)
    for router in _ROUTERS:
        app.routes.extend(router.routes)
    if context.engine_router is not None:
        app.routes.extend(context.engine_router.routes)
    return app
