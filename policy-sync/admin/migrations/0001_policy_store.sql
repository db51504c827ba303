-- The policy store: every version of every rule and override, with who made it, when and why; which gateway runs which
-- version; and what shadow rules would have done.
--
-- A *change* is one transaction. It takes the next version under a row lock that it holds until it commits
-- (`begin_change`), so versions become visible in their order: who has seen version N and asks for what came after it
-- never misses a change that took a lower number and committed later. A row of `rule` or `override` is what a change made
-- of it; nothing is ever updated or deleted there. A body is what the policy file says of it, as JSON, without what tells
-- which one it is (`name`, or `rule` and `identity`); no body says that it is gone.
--
-- Two roles, which the logins of programs are made members of. `sluice_gateway`: reads the policy, and writes by two
-- functions and in no other way. `sluice_admin`, for the admin API: makes changes, and never alters one that was made.

CREATE SCHEMA sluice;

-- Which of these files were applied. `sluice-admin migrate` writes it, in the transaction of the file.
CREATE TABLE sluice.migration (
    number     integer PRIMARY KEY,
    name       text NOT NULL,
    sha256     bytea NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row: the version that the policy is at.
CREATE TABLE sluice.policy (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    version bigint NOT NULL CHECK (version >= 0)
);
INSERT INTO sluice.policy (version) VALUES (0);

CREATE TABLE sluice.change (
    version        bigint PRIMARY KEY CHECK (version > 0),
    -- Tells this change from one of another history under the same number, after a store was restored from a backup.
    token          uuid NOT NULL DEFAULT gen_random_uuid(),
    author         text NOT NULL CHECK (author <> ''),
    comment        text NOT NULL DEFAULT '',
    made_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The version whose values it brought back, if that is what it did.
    rolled_back_to bigint
);

CREATE TABLE sluice.rule (
    name    text NOT NULL,
    version bigint NOT NULL REFERENCES sluice.change,
    body    jsonb,
    PRIMARY KEY (name, version)
);
CREATE INDEX rule_by_version ON sluice.rule (version);

CREATE TABLE sluice.override (
    -- A rule's name, or `*`.
    rule     text NOT NULL,
    identity text[] NOT NULL,
    version  bigint NOT NULL REFERENCES sluice.change,
    body     jsonb,
    PRIMARY KEY (rule, identity, version)
);
CREATE INDEX override_by_version ON sluice.override (version);

-- Begins a change: returns its version. Everybody else who begins one waits until this transaction has ended.
CREATE FUNCTION sluice.begin_change(author text, comment text, rolled_back_to bigint DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    number bigint;
BEGIN
    UPDATE sluice.policy AS p SET version = p.version + 1 RETURNING p.version INTO number;
    INSERT INTO sluice.change (version, author, comment, rolled_back_to) VALUES (number, $1, $2, $3);
    -- Delivered when this commits, to whoever LISTENs.
    PERFORM pg_notify('sluice_policy', number::text);
    RETURN number;
END $$;

-- What happened after a version that the asker has, which it proves by the version's token. Where the proof fails (it has
-- nothing, or what it has is of another history) the answer is everything there is.
--
-- The first row is always the policy itself (`kind` = 'policy'): the version that the asker has afterwards, its token in
-- `name`, and in `body` `whole` or `since`. Then rules (`kind` = 'rule') and overrides ('override') as of that
-- version, one row each; one without a body is gone. An identity is a JSON array of strings. It is one statement, so it sees the store at one moment.
CREATE FUNCTION sluice.changes_after(after bigint, after_token text)
RETURNS TABLE (kind text, version bigint, name text, identity text, body text)
LANGUAGE sql STABLE AS $$
    WITH head AS (
        SELECT p.version, coalesce(c.token::text, '') AS token
        FROM sluice.policy p LEFT JOIN sluice.change c ON c.version = p.version
    ), start AS (
        SELECT coalesce((SELECT c.version FROM sluice.change c WHERE c.version = after AND c.token::text = after_token), 0) AS version
    ), rules AS (
        SELECT DISTINCT ON (r.name) r.name, r.version, r.body
        FROM sluice.rule r WHERE r.version > (SELECT version FROM start)
        ORDER BY r.name, r.version DESC
    ), overrides AS (
        SELECT DISTINCT ON (o.rule, o.identity) o.rule, o.identity, o.version, o.body
        FROM sluice.override o WHERE o.version > (SELECT version FROM start)
        ORDER BY o.rule, o.identity, o.version DESC
    )
    SELECT 'policy', head.version, head.token, NULL::text, CASE WHEN start.version = 0 THEN 'whole' ELSE 'since' END
    FROM head, start
    UNION ALL
    SELECT 'rule', rules.version, rules.name, NULL, rules.body::text
    FROM rules, start WHERE start.version > 0 OR rules.body IS NOT NULL
    UNION ALL
    SELECT 'override', overrides.version, overrides.rule, to_json(overrides.identity)::text, overrides.body::text
    FROM overrides, start WHERE start.version > 0 OR overrides.body IS NOT NULL
$$;

-- The admin API's callers. Only a hash of a token is kept (SHA-256: tokens are long and random).
CREATE TABLE sluice.api_token (
    name       text PRIMARY KEY,
    sha256     bytea NOT NULL UNIQUE CHECK (length(sha256) = 32),
    can_write  boolean NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    revoked_at timestamptz
);

CREATE TABLE sluice.gateway (
    name           text PRIMARY KEY,
    policy_version bigint NOT NULL,
    software       text NOT NULL,
    -- Why it could not take the newest policy, if so.
    problem        text,
    started_at     timestamptz NOT NULL,
    seen_at        timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- A gateway says what it runs.
CREATE FUNCTION sluice.report_gateway(name text, policy_version bigint, software text, problem text, up_secs double precision)
RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog AS $$
    INSERT INTO sluice.gateway AS g (name, policy_version, software, problem, started_at)
    VALUES (left($1, 200), $2, left($3, 100), left($4, 2000), clock_timestamp() - make_interval(secs => $5))
    ON CONFLICT (name) DO UPDATE SET policy_version = excluded.policy_version, software = excluded.software,
        problem = excluded.problem, started_at = excluded.started_at, seen_at = excluded.seen_at
$$;

-- What shadow rules saw, by the hour (UTC) in which they saw it. `rule_version` is that of the rule's last change.
CREATE TABLE sluice.shadow_total (
    rule         text NOT NULL,
    rule_version bigint NOT NULL,
    hour         timestamptz NOT NULL,
    checks       bigint NOT NULL,
    denied       bigint NOT NULL,
    PRIMARY KEY (rule, rule_version, hour)
);
CREATE TABLE sluice.shadow_identity (
    rule         text NOT NULL,
    rule_version bigint NOT NULL,
    hour         timestamptz NOT NULL,
    -- As gateways encode it, or a keyed hash of that.
    identity     text NOT NULL,
    checks       bigint NOT NULL,
    denied       bigint NOT NULL,
    first_seen   timestamptz NOT NULL,
    last_seen    timestamptz NOT NULL,
    PRIMARY KEY (rule, rule_version, hour, identity)
);
-- The last batch of each gateway process that was added: one that comes twice, because its sender never heard that it had
-- arrived, is added once.
CREATE TABLE sluice.shadow_source (
    source   uuid PRIMARY KEY,
    sequence bigint NOT NULL,
    seen_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Adds a batch: of each rule its totals, and of each identity that the gateway followed its own. Batches of a source come in
-- order. Returns whether it was new. Of a rule's hour the identities that were denied most are kept.
CREATE FUNCTION sluice.add_shadow(source uuid, sequence bigint, totals jsonb, identities jsonb, identities_max integer DEFAULT 1000)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    INSERT INTO sluice.shadow_source AS s (source, sequence) VALUES ($1, $2)
    ON CONFLICT ON CONSTRAINT shadow_source_pkey DO UPDATE SET sequence = excluded.sequence, seen_at = clock_timestamp()
    WHERE s.sequence < excluded.sequence;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    -- In one order, so that two gateways never wait for each other.
    INSERT INTO sluice.shadow_total AS t (rule, rule_version, hour, checks, denied)
    SELECT n.rule, n.rule_version, n.hour, sum(n.checks), sum(n.denied)
    FROM jsonb_to_recordset($3) AS n (rule text, rule_version bigint, hour timestamptz, checks bigint, denied bigint)
    GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
    ON CONFLICT ON CONSTRAINT shadow_total_pkey DO UPDATE
    SET checks = t.checks + excluded.checks, denied = t.denied + excluded.denied;
    INSERT INTO sluice.shadow_identity AS i (rule, rule_version, hour, identity, checks, denied, first_seen, last_seen)
    SELECT n.rule, n.rule_version, n.hour, n.identity, sum(n.checks), sum(n.denied), min(n.first_seen), max(n.last_seen)
    FROM jsonb_to_recordset($4) AS n (rule text, rule_version bigint, hour timestamptz, identity text, checks bigint,
        denied bigint, first_seen timestamptz, last_seen timestamptz)
    GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
    ON CONFLICT ON CONSTRAINT shadow_identity_pkey DO UPDATE
    SET checks = i.checks + excluded.checks, denied = i.denied + excluded.denied,
        first_seen = least(i.first_seen, excluded.first_seen), last_seen = greatest(i.last_seen, excluded.last_seen);
    DELETE FROM sluice.shadow_identity AS i USING (
        SELECT o.rule, o.rule_version, o.hour, o.identity,
            row_number() OVER (PARTITION BY o.rule, o.rule_version, o.hour ORDER BY o.denied DESC, o.checks DESC, o.identity) AS place
        FROM sluice.shadow_identity o
        WHERE (o.rule, o.rule_version, o.hour) IN (
            SELECT n.rule, n.rule_version, n.hour
            FROM jsonb_to_recordset($4) AS n (rule text, rule_version bigint, hour timestamptz))
    ) AS placed
    WHERE placed.place > $5 AND (i.rule, i.rule_version, i.hour, i.identity)
        = (placed.rule, placed.rule_version, placed.hour, placed.identity);
    RETURN true;
END $$;

-- Roles belong to the whole server: another database may have made them, or be making them now.
DO $$
DECLARE
    role name;
BEGIN
    FOREACH role IN ARRAY ARRAY['sluice_gateway', 'sluice_admin'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', role);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
                NULL;
            END;
        END IF;
    END LOOP;
END $$;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA sluice FROM PUBLIC;
GRANT USAGE ON SCHEMA sluice TO sluice_gateway, sluice_admin;

GRANT SELECT ON sluice.policy, sluice.change, sluice.rule, sluice.override TO sluice_gateway;
GRANT EXECUTE ON FUNCTION sluice.changes_after(bigint, text) TO sluice_gateway;
GRANT EXECUTE ON FUNCTION sluice.report_gateway(text, bigint, text, text, double precision) TO sluice_gateway;
GRANT EXECUTE ON FUNCTION sluice.add_shadow(uuid, bigint, jsonb, jsonb, integer) TO sluice_gateway;

GRANT SELECT ON ALL TABLES IN SCHEMA sluice TO sluice_admin;
GRANT UPDATE ON sluice.policy TO sluice_admin;
GRANT INSERT ON sluice.change, sluice.rule, sluice.override TO sluice_admin;
-- What is kept for a while only.
GRANT DELETE ON sluice.gateway, sluice.shadow_total, sluice.shadow_identity, sluice.shadow_source TO sluice_admin;
GRANT EXECUTE ON FUNCTION sluice.changes_after(bigint, text), sluice.begin_change(text, text, bigint) TO sluice_admin;
