// A real OpenID Connect provider for tests: node provider.mjs '{"folder": ..., "port": 0, "redirect": ..., "secret": ..., "lasts": 300}'
// Prints its issuer. Any name logs in, with any password. It has a new key each time that it starts.
import { generateKeyPairSync, randomUUID } from 'node:crypto'
import { createServer } from 'node:http'
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'

const given = JSON.parse(process.argv[2])
const found = createRequire(`${given.folder}/`).resolve('oidc-provider')
const { default: Provider } = await import(pathToFileURL(found).href)
const key = generateKeyPairSync('rsa', { modulusLength: 2048 }).privateKey.export({ format: 'jwk' })
const server = createServer()
server.listen(given.port, '127.0.0.1', () => {
  const issuer = `http://127.0.0.1:${server.address().port}`
  const provider = new Provider(issuer, {
    clients: [
      { client_id: 'sluice', client_secret: given.secret, redirect_uris: [given.redirect] },
      { client_id: 'other', client_secret: given.secret, redirect_uris: [given.redirect] },
    ],
    jwks: { keys: [{ ...key, kid: randomUUID(), use: 'sig', alg: 'RS256' }] },
    findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, preferred_username: id }) }),
    claims: { openid: ['sub'], profile: ['preferred_username'] },
    conformIdTokenClaims: false,
    pkce: { required: () => true },
    ttl: { IdToken: given.lasts, AccessToken: 60, AuthorizationCode: 60, Interaction: 600, Session: 3600, Grant: 3600 },
    cookies: { keys: [randomUUID()] },
  })
  server.on('request', provider.callback())
  console.log(issuer)
})
process.stdin.on('end', () => process.exit(0)).resume()
