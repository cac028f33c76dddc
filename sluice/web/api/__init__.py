"""The endpoints of /api/v1, one file a subject. OpenAPI and the tests are made from this table."""

from sluice.web.api import cluster, jobs, nodes, operators, pools, reports, services, tenants, writes

ENDPOINTS = (
    *cluster.ENDPOINTS,
    *jobs.ENDPOINTS,
    *nodes.ENDPOINTS,
    *tenants.ENDPOINTS,
    *services.ENDPOINTS,
    *pools.ENDPOINTS,
    *reports.ENDPOINTS,
    *operators.ENDPOINTS,
    *writes.ENDPOINTS,
)
